"""Settings: who wins, what is an error, and that each error names its source and the setting."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from twinplane.models import DEFAULT_MODEL, SIMULATED_MODEL
from twinplane.settings.control import ControlConfig
from twinplane.settings.known import known_settings
from twinplane.settings.resolution import (
    SettingsError,
    add_arguments,
    config_file,
    from_command_line,
    option,
    resolve,
    setting_names,
    to_arguments,
)
from twinplane.settings.worker import WorkerConfig


@dataclass(frozen=True, slots=True)
class Ship:
    """One of each type."""

    name: str = option("anna", "its name", group="looks")
    colour: str = option("red", "its 100% paint", group="looks", choices=("red", "green"))
    masts: int = option(2, "how many", group="build")
    draught: float | None = option(None, "in metres", group="build")
    hold_bytes: int = option(1024, "room", group="build")
    port: int | None = option(80, "where it lies", group="build")
    chart: Path | None = option(None, "a file", group="build")
    sails: bool = option(True, "whether it sails", group="build")

    def __post_init__(self) -> None:
        if self.masts < 1:
            raise ValueError("masts must be at least 1")


KNOWN = {"ship": setting_names(Ship), "dock": frozenset({"depth", "name"})}


def parse(*flags: str, cls: type = Ship) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, cls)
    return parser.parse_args(flags)


def ship(*flags: str, environ: dict[str, str] | None = None, file: Path | None = None) -> Ship:
    return resolve(Ship, parse(*flags), environ or {}, file, "ship", known=KNOWN)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "settings.toml"


def test_defaults_when_nothing_is_given() -> None:
    assert ship() == Ship()


def test_a_default_that_is_handed_in_loses_to_all_that_is_given(toml: Path) -> None:
    def handed(*flags: str, environ: dict[str, str] | None = None, file: Path | None = None) -> str:
        defaults = {"name": "handed"}
        return resolve(
            Ship, parse(*flags), environ or {}, file, "ship", known=KNOWN, defaults=defaults
        ).name

    toml.write_text('name = "top"\n')
    assert handed() == "handed"
    assert handed(file=toml) == "top"
    assert handed(environ={"TWINPLANE_NAME": "environ"}) == "environ"
    assert handed("--name=flag") == "flag"


def test_a_simulated_worker_has_a_model_of_its_own() -> None:
    assert WorkerConfig().model == DEFAULT_MODEL
    assert WorkerConfig(simulate=True).model == SIMULATED_MODEL
    assert WorkerConfig(simulate=True, model=DEFAULT_MODEL).model == DEFAULT_MODEL
    with pytest.raises(ValueError, match="model simulated has no weights: add --simulate"):
        WorkerConfig(model=SIMULATED_MODEL)


def test_flag_beats_environment_beats_own_table_beats_top_beats_default(toml: Path) -> None:
    toml.write_text('name = "top"\n')
    assert ship(file=toml).name == "top"
    toml.write_text('name = "top"\n[ship]\nname = "table"\n')
    assert ship(file=toml).name == "table"
    environ = {"TWINPLANE_NAME": "environment"}
    assert ship(file=toml, environ=environ).name == "environment"
    assert ship("--name", "flag", file=toml, environ=environ).name == "flag"


def test_text_becomes_the_annotated_type() -> None:
    given = ship(
        "--masts=3", "--draught=1.5", "--hold-bytes=2KiB", "--chart=a/b", "--no-sails",
        environ={"TWINPLANE_COLOUR": "green"},
    )  # fmt: skip
    assert given == Ship("anna", "green", 3, 1.5, 2048, 80, Path("a/b"), False)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("2 GiB", 2 << 30),
        ("3Ti", 3 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert ship("--hold-bytes", text).hold_bytes == size


@pytest.mark.parametrize("text", ["", "MiB", "1 PiB", "-1", "1i", "1..5MB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(SettingsError, match="--hold-bytes"):
        ship(f"--hold-bytes={text}")


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_true(text: str) -> None:
    assert ship(environ={"TWINPLANE_SAILS": text}).sails is True


@pytest.mark.parametrize("text", ["0", "False", "no", "off"])
def test_false(text: str) -> None:
    assert ship(environ={"TWINPLANE_SAILS": text}).sails is False


def test_none_is_a_value_only_where_it_can_be() -> None:
    assert ship("--port=none").port is None
    assert ship("--name=none").name == "none"
    with pytest.raises(SettingsError, match=r"--masts: 'none' is not a whole number"):
        ship("--masts=none")


def test_toml_has_its_own_types(toml: Path) -> None:
    toml.write_text("[ship]\nmasts = 4\ndraught = 2\nsails = false\nhold_bytes = '1MiB'\n")
    assert ship(file=toml) == Ship(masts=4, draught=2.0, sails=False, hold_bytes=1 << 20)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("masts = 1.5", "is not a whole number"),
        ("masts = true", "is not a whole number"),
        ("name = 3", "is not text"),
        ("sails = 'maybe'", "is neither true nor false"),
        ("draught = 'deep'", "is not a number"),
        ("chart = 1", "is not a path"),
        ("colour = 'gren'", "did you mean green"),
    ],
)
def test_a_wrong_value_names_the_file_and_the_key(toml: Path, line: str, message: str) -> None:
    toml.write_text(f"[ship]\n{line}\n")
    key = line.split(" ")[0]
    with pytest.raises(SettingsError, match=message) as caught:
        ship(file=toml)
    assert f"{toml}: [ship] {key}:" in str(caught.value)


def test_a_wrong_value_names_its_flag_or_variable() -> None:
    with pytest.raises(SettingsError, match=r"^--masts: 'two'"):
        ship("--masts=two")
    with pytest.raises(SettingsError, match=r"^TWINPLANE_MASTS: 'two'"):
        ship(environ={"TWINPLANE_MASTS": "two"})
    with pytest.raises(SettingsError, match="masts must be at least 1"):
        ship("--masts=0")


def test_unknown_keys_are_errors_that_suggest(toml: Path) -> None:
    for content, message in (
        ("nam = 'x'", r"unknown key nam; did you mean name\?"),
        ("[shp]\nname = 'x'", r"unknown key shp; did you mean ship\?"),
        ("[ship]\nmats = 1", r"unknown key \[ship\] mats; did you mean masts\?"),
        ("[dock]\nmasts = 1", r"unknown key \[dock\] masts"),
    ):
        toml.write_text(content)
        with pytest.raises(SettingsError, match=message):
            ship(file=toml)
    with pytest.raises(SettingsError, match="TWINPLANE_MAST; did you mean TWINPLANE_MASTS"):
        ship(environ={"TWINPLANE_MAST": "1"})


def test_the_other_planes_settings_are_not_errors(toml: Path) -> None:
    toml.write_text("depth = 3\n[dock]\nname = 'north'\n")
    environ = {"TWINPLANE_DEPTH": "4", "TWINPLANE_HOME": "/x", "TWINPLANE_CONFIG": "y"}
    assert ship(file=toml, environ=environ) == Ship()


def test_a_file_that_cannot_be_read_is_named(toml: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        ship(file=toml)
    toml.write_text("name = ")
    with pytest.raises(SettingsError, match=str(toml)):
        ship(file=toml)


def test_the_file_is_named_by_flag_or_environment(toml: Path) -> None:
    assert config_file(parse(), {}) is None
    assert config_file(parse(), {"TWINPLANE_CONFIG": "a"}) == Path("a")
    assert config_file(parse("--config", "b"), {"TWINPLANE_CONFIG": "a"}) == Path("b")


def test_flags_can_be_handed_on_unchanged() -> None:
    flags = ["--config=x.toml", "--name=-v", "--masts=3", "--no-sails"]
    assert to_arguments(Ship, parse(*flags)) == flags


def test_help_is_grouped_and_shows_defaults_and_choices() -> None:
    parser = argparse.ArgumentParser(usage="")
    add_arguments(parser, Ship, without=("chart",))
    text = parser.format_help()
    assert text.index("looks:") < text.index("--name TEXT") < text.index("build:")
    for part in ("{red,green}", "100% paint", "(default: 2)", "--sails, --no-sails"):
        assert part in text
    assert "--chart" not in text


def test_two_classes_share_a_flag() -> None:
    parser = argparse.ArgumentParser(usage="")
    add_arguments(parser, ControlConfig, WorkerConfig)
    assert parser.format_help().count("--max-num-seqs N") == 1


def test_a_mistake_on_the_command_line_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        from_command_line(
            Ship, ["--masts=x"], {}, prog="ship", description="", table="ship", known=KNOWN
        )
    assert caught.value.code == 2
    assert capsys.readouterr().err == "ship: --masts: 'x' is not a whole number\n"


def test_the_known_names_are_those_of_the_planes() -> None:
    assert known_settings()["control"] == setting_names(ControlConfig)
    assert known_settings()["worker"] == setting_names(WorkerConfig)


@dataclass(frozen=True, slots=True)
class Fleet:
    """One setting that may be repeated."""

    ship: str = option("anna", "a ship", group="ships", repeated=True)


def fleet(*flags: str, environ: dict[str, str] | None = None, file: Path | None = None) -> str:
    known = {"fleet": setting_names(Fleet)}
    return resolve(Fleet, parse(*flags, cls=Fleet), environ or {}, file, "fleet", known=known).ship


def test_a_repeated_flag_keeps_every_value() -> None:
    assert fleet() == "anna"
    assert fleet("--ship=berta") == "berta"
    assert fleet("--ship=berta", "--ship", "clara") == "berta clara"
    assert to_arguments(Fleet, parse("--ship=a", "--ship=b", cls=Fleet)) == ["--ship=a b"]
    assert fleet(environ={"TWINPLANE_SHIP": "dora emma"}) == "dora emma"


@pytest.mark.parametrize(
    ("text", "value"),
    [('"a"', "a"), ('"a b"', "a b"), ('["a", "b"]', "a b"), ('["a"]', "a"), ("[]", "")],
)
def test_a_repeated_setting_may_be_a_list_in_the_file(toml: Path, text: str, value: str) -> None:
    toml.write_text(f"ship = {text}\n")
    assert fleet(file=toml) == value


@pytest.mark.parametrize("text", ["1", "[1]", '["a", 1]', '[["a"]]', "true"])
def test_other_things_are_no_repeated_setting(toml: Path, text: str) -> None:
    toml.write_text(f"ship = {text}\n")
    with pytest.raises(SettingsError, match=r"ship: .* is not text"):
        fleet(file=toml)
