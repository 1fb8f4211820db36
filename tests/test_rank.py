"""Devices and meshes ranked: laws of order, cost and deadline, by a faked compiler, and a few by a real one."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _documented import assert_documented, assert_narrow
from _shapes import real
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from rlxjax.calibration import FunctionPrediction
from rlxjax.targets import DoesNotFitError, Prices, check_compiler, load_prices, rank_meshes, rank_targets

ROOT = Path(__file__).parent.parent
X = real(64, 64)
NAMES = ["tpu-v5e", "tpu-v6e", "h100", "l4"]
PRICES = Prices(schema_version=1, currency="USD", prices_per_hour={"tpu-v5e": 1.0, "tpu-v6e": 4.0, "h100": 20.0})


def double(x):
    return 2 * x


@pytest.fixture
def compiled(monkeypatch):
    """Return a setter of what a call takes by the name of a target or by its mesh: ns, or that it does not fit."""
    asked = []

    def set_to(times_ns, uncounted=()):
        def profile(fn, *args, level="jaxpr", target=None, mesh=None, trip_counts=None):
            if level == "jaxpr":
                return rx.profile_function(fn, *args)
            key = target.name if mesh is None else tuple(mesh.values())
            asked.append((key, args))
            if isinstance(times_ns[key], str):
                raise ValueError(times_ns[key])
            if times_ns[key] is None:
                raise DoesNotFitError("does not fit", 2 * target.memory_bytes, target.memory_bytes)
            return dataclasses.replace(rx.profile_function(fn, *args), by_family={"key": key})

        def times(profiles, device, calibration=None):
            key = profiles[0].by_family["key"]
            time_ns, left_out = times_ns[key], ("a loop",) if key in uncounted else ()
            high_ns = math.inf if left_out else 2 * time_ns
            one = FunctionPrediction(
                time_ns, time_ns / 2, high_ns, {}, profiles[0], True, left_out, device.name, "a guess"
            )
            one = one._replace(pipelined_ns=time_ns / 4, binds="memory")
            return rx.calibration.FunctionTimes((one,), np.ones((1, 1)), np.ones((1, 1)), np.ones(1))

        monkeypatch.setattr("rlxjax.targets._rank.profile_function", profile)
        monkeypatch.setattr("rlxjax.targets._rank.times_for_target", times)
        monkeypatch.setattr("rlxjax.targets._rank.check_compiler", lambda platform: None)
        return asked

    return set_to


def test_what_fits_and_has_an_upper_end_comes_first_and_the_cheapest_meets_the_deadline(compiled):
    times_ns = {"tpu-v5e": 4e6, "tpu-v6e": 2e6, "h100": 1e6, "l4": 8e6}
    compiled(times_ns)
    ranking = rank_targets(double, X, targets=NAMES, prices=PRICES)
    assert [row.name for row in ranking.rows] == ["h100", "tpu-v6e", "tpu-v5e", "l4"]
    assert (ranking.best, ranking.cheapest) == ("h100", "tpu-v5e")
    for row in ranking.rows:  # price, hours and devices
        price = PRICES.prices_per_hour.get(row.name)
        expected = None if price is None else pytest.approx(price * times_ns[row.name] / 4 / 3600e9)
        assert (row.cost, row.devices) == (expected, 1)
    text = str(ranking)
    assert text.splitlines()[1].endswith("USD")
    assert "l4: no price given" in text
    assert_narrow(text)
    late = rank_targets(double, X, targets=NAMES, prices=PRICES, deadline_s=3e-3)
    assert late.cheapest == "tpu-v6e"
    assert "the cheapest that fits and takes at most 3 ms: tpu-v6e" in str(late)
    none = rank_targets(double, X, targets=NAMES, prices=PRICES, deadline_s=1e-9)
    assert none.cheapest is None
    assert "cost" not in str(rank_targets(double, X, targets=NAMES))
    assert rank_targets(double, X, targets=NAMES).cheapest is None


def test_a_time_that_is_the_least_says_so_and_is_neither_the_best_nor_the_cheapest(compiled):
    compiled({"tpu-v5e": 1e3, "h100": 2e3, "l4": None}, uncounted=["tpu-v5e"])
    ranking = rank_targets(double, X, targets=["tpu-v5e", "h100", "l4"], prices=PRICES)
    assert [(row.name, row.is_sure, row.fits) for row in ranking.rows] == [
        ("h100", True, True),
        ("tpu-v5e", False, True),
        ("l4", False, False),
    ]
    assert (ranking.best, ranking.cheapest) == ("h100", "h100")
    text = " ".join(str(ranking).split())
    assert "tpu-v5e > 1 us 250 ns" in text
    assert "tpu-v5e: the time is a lower bound: a loop" in text
    assert_narrow(str(ranking))
    compiled({"tpu-v5e": 1e3}, uncounted=["tpu-v5e"])
    assert rank_targets(double, X, targets=["tpu-v5e"]).best is None


def test_all_divisions_of_the_devices_are_compiled_and_arguments_keep_their_specs(compiled):
    meshes = {(1, 8): 4e6, (2, 4): None, (4, 2): "no: 3 is not divided by 2", (8, 1): 1e6}
    asked = compiled(meshes)
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spread = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("model", "data")))
    ranking = rank_meshes(lambda x, y: x + y, spread, X, target="tpu-v5e", devices=8, prices=PRICES)
    assert {key for key, _ in asked} == set(meshes)
    for key, (first, second) in asked:
        assert tuple(first.sharding.mesh.shape.values()) == key
        assert first.sharding.spec == PartitionSpec("model", "data")
        assert getattr(second, "sharding", None) is None
    assert [row.name for row in ranking.rows] == ["8x1", "1x8", "2x4"]
    assert dict(ranking.left_out) == {"4x2": "no: 3 is not divided by 2"}
    assert [dict(row.mesh) for row in ranking.rows][0] == {"data": 8, "model": 1}
    assert ranking.rows[0].cost == pytest.approx(1.0 * 8 * 1e6 / 4 / 3600e9)
    assert str(ranking).startswith("data x model")
    assert_narrow(str(ranking))
    assert_documented("profile --devices", json.loads(json.dumps(ranking.as_dict())))
    given = rank_meshes(double, X, target="tpu-v5e", meshes=[{"data": 8, "model": 1}])
    assert [row.name for row in given.rows] == ["8x1"]


def test_bad_meshes_and_prices_are_refused_in_one_line(tmp_path):
    path, content = tmp_path / "prices.json", {"schema_version": 1, "currency": "USD"}

    def priced(prices):
        path.write_text(json.dumps(content | {"prices_per_hour": prices}))
        return load_prices(path)

    for said, ask in {
        "devices: expected an integer of at least 1, got 0": lambda: rank_meshes(double, X, target="l4", devices=0),
        "axes: expected different names": lambda: rank_meshes(double, X, target="l4", axes=("a", "a")),
        "axes: expected different names of axes, got 'data'": lambda: rank_meshes(double, X, target="l4", axes="data"),
        "meshes: expected sizes": lambda: rank_meshes(double, X, target="l4", meshes=[]),
        "same axes": lambda: rank_meshes(double, X, target="l4", meshes=[{"a": 2}, {"b": 2}]),
        "deadline_s: expected a positive": lambda: rank_targets(double, X, targets=["l4"], deadline_s=-1.0),
        "missing.json: no such file": lambda: rank_targets(double, X, targets=["l4"], prices="missing.json"),
        "prices.json: prices_per_hour.l4: .*greater than 0, got -1.0": lambda: priced({"l4": -1.0}),
        "prices.json: prices_per_hour.l4: .*got 'cheap'": lambda: priced({"l4": "cheap"}),
        "prices.json: prices_per_hour: target: .*got 'l5'; the nearest: ": lambda: priced({"l5": 1.0}),
    }.items():
        with pytest.raises(ValueError, match=said) as caught:
            ask()
        assert "\n" not in str(caught.value)
    assert priced({"L4": 0.5}).prices_per_hour == {"l4": 0.5}
    assert load_prices(ROOT / "docs/prices.example.json").about.startswith("An example")


@pytest.mark.parametrize("target", ["l4", "tpu-v5e"])
def test_a_calibration_of_another_device_is_refused_for_a_target(target):
    path = ROOT / "docs/evidence/accelerator-h100/calibration.json"
    asked = ["profile", "math:sin", "--arg", "f32[4]", "--target", target, "--calibration", str(path)]
    result = CliRunner().invoke(app, asked)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
    assert "--calibration: expected a calibration of " in result.stderr
    assert "of NVIDIA H100" in result.stderr


def step(weights, x):
    grads = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2))(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


@pytest.mark.parametrize("target", ["tpu-v5e", "h100"])
def test_a_compiler_divides_a_training_step_over_each_mesh(target, monkeypatch, tmp_path):
    try:
        check_compiler(rx.targets.target_device(target).platform)
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    weights = {"up": real(256, 1024), "down": real(1024, 256)}
    ranking = rank_meshes(step, weights, real(512, 256), target=target, devices=4, prices=PRICES)
    rows = {row.name: row for row in ranking.rows}
    assert sorted(rows) == ["1x4", "2x2", "4x1"], ranking.left_out
    assert all(row.devices == 4 and row.fits and 0 < row.pipelined_ns <= row.time_ns for row in rows.values())
    assert ranking.rows[0].name == ranking.best
    assert_narrow(str(ranking))
