"""Predicted steps beside measured ones, read from directories of runs."""

import json
import re
from dataclasses import replace

import pytest

from megatron_merak.cli.plan import main
from megatron_merak.cluster import CLUSTERS, ProductRate, Profile, Rates, read_profile
from megatron_merak.errors import ConfigError, ReportError
from megatron_merak.report.predictions import factors, predictions_of


def directory(path, starts, rows):
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"format": 1, "starts": starts}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(predicted, layout="1 rank", **more):
    facts = {"layout": layout, "device_name": "a cpu", "planned_on": "cpu", "planned_samples": 4}
    return facts | {"predicted_seconds": predicted} | more


def steps(first, seconds, samples=4, consumed=0, kind="seconds"):
    for place, taken in enumerate(seconds):
        consumed += samples
        row = {"kind": "train", "iteration": first + place, "consumed_samples": consumed}
        yield row | {kind: taken, "loss": 1.0}


def began(number, iteration, consumed):
    return {"kind": "start", "start": number, "iteration": iteration, "consumed_samples": consumed}


def test_each_start_has_its_own_prediction(tmp_path):
    rows = [
        began(0, 0, 0),
        *steps(1, [9.0, 9.0, 2.0, 4.0, 3.0, 50.0]),
        began(1, 5, 20),  # the sixth step is lost
        *steps(6, [9.0, 9.0, 1.0, 1.0], consumed=20),
        *steps(10, [70.0], samples=2, consumed=36),  # of another batch
    ]
    run = directory(tmp_path / "run", [start(2.0), start(2.0, "2 ranks")], rows)
    first, second = predictions_of(run)
    assert (first.layout, first.measured, first.steps) == ("1 rank", 3.0, 3)
    assert (second.layout, second.measured, second.steps) == ("2 ranks", 1.0, 2)
    (factor,) = factors([first, second])
    assert (factor.device, factor.factor, factor.least, factor.most) == ("a cpu", 1.0, 0.5, 1.5)


def test_devices_have_factors_of_their_own(tmp_path, capsys):
    rows = [began(0, 0, 0), *steps(1, [1.0] * 4)]
    one = directory(tmp_path / "one", [start(0.5)], rows)
    two = directory(tmp_path / "two", [start(4.0, device_name="RTX", planned_on="H100")], rows)
    main(["calibrate", str(one), str(two)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[-1] == "2.00" and lines[2].split()[-1] == "0.25"
    assert lines[-2] == "a cpu: steps take 2.00 of predicted, 1 start"
    assert lines[-1] == "RTX, planned as H100: steps take 0.25 of predicted, 1 start"


def profile(path, **more):
    """A file of merak-probe, of round rates."""
    rates = Rates((ProductRate(64, 64, 64, "float32", 1e9, 1e9, 1e9),), (), "by hand")
    device = replace(CLUSTERS["cpu"].device, rates=rates)
    path.write_text(Profile(device, (), 1, 0.0, "a cpu", "today", "2.11", **more).to_json())
    return path


SHOWN = """show --world-size 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --vocab-size 64 --micro-batch-size 1 --global-batch-size 1""".split()


def test_plans_allow_for_what_runs_took(tmp_path, capsys):
    """Also for runs whose plans did so: the factor is of the model, without those of before."""
    rows = [began(0, 0, 0), *steps(1, [1.0] * 4)]
    here = profile(tmp_path / "here.json")
    main([*SHOWN, "--device-profile", str(here)])
    plain = capsys.readouterr().out
    assert "as runs took" not in plain
    for number, facts in enumerate((start(0.5), start(1.0, step_factor=2.0))):
        run = directory(tmp_path / str(number), [facts], rows)
        main(["calibrate", str(run), "--into", str(here)])
        told = capsys.readouterr().out.splitlines()
        assert told[-2:] == [
            "a cpu: steps take 2.00 of predicted, 1 start",
            f"wrote {here}: plans with --device-profile {here} allow for 2.00",
        ]
        assert read_profile(here).step_factor == 2
        main([*SHOWN, "--device-profile", str(here)])
        slower = capsys.readouterr().out
        assert ", 2.00 times the model's: as runs took" in slower
        assert seconds_of(slower) == pytest.approx(2 * seconds_of(plain), rel=1e-3)


def seconds_of(shown):
    found = re.search(r"predicted on .*: ([0-9.]+) (m?s|us) per step", shown)
    return float(found[1]) * {"s": 1, "ms": 1e-3, "us": 1e-6}[found[2]]


def test_a_profile_of_another_device_gets_no_factor(tmp_path):
    rows = [began(0, 0, 0), *steps(1, [1.0] * 4)]
    run = directory(tmp_path / "run", [start(0.5, planned_on="H100")], rows)
    other = directory(tmp_path / "other", [start(0.5, device_name="another")], rows)
    here = profile(tmp_path / "here.json")
    before = here.read_text()
    with pytest.raises(SystemExit, match="it is of cpu, and the runs were planned for H100"):
        main(["calibrate", str(run), "--into", str(here)])
    with pytest.raises(SystemExit, match="the runs are of 2 devices"):
        main(["calibrate", str(run), str(other), "--into", str(here)])
    with pytest.raises(SystemExit, match="it names a profile"):
        main(["calibrate", str(run), "--into"])
    assert here.read_text() == before


@pytest.mark.parametrize("factor", [0, -1.0, "2", True])
def test_an_impossible_factor_is_refused(factor, tmp_path):
    here = profile(tmp_path / "here.json")
    here.write_text(json.dumps(json.loads(here.read_text()) | {"step_factor": factor}))
    with pytest.raises(ConfigError, match="step_factor .*: it is not a number above 0"):
        read_profile(here)


@pytest.mark.parametrize(
    ("starts", "rows", "message"),
    [
        ([{"layout": "1 rank"}], [began(0, 0, 0), *steps(1, [1.0] * 4)], "no prediction"),
        ([start(1.0)], [began(0, 0, 0), *steps(1, [1.0] * 2)], "more than 2 measured steps"),
        ([start(1.0)], [*steps(1, [1.0] * 4)], "no prediction"),
        (
            [start(1.0)],
            [began(0, 0, 0), *steps(1, [1.0] * 4, kind="modelled_seconds")],
            "emulated cluster",
        ),
    ],
)
def test_runs_that_say_nothing_are_refused(starts, rows, message, tmp_path):
    with pytest.raises(ReportError, match=message):
        predictions_of(directory(tmp_path / "run", starts, rows))


@pytest.mark.parametrize(
    ("words", "message"), [([], "calibrate"), (["--fast"], "--fast"), (["nowhere"], "nowhere")]
)
def test_the_command_refuses(words, message):
    with pytest.raises(SystemExit, match=message):
        main(["calibrate", *words])
