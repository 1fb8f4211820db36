"""What programs take of devices that are not there: their kernels, exchanges and calls, by texts of programs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import rlxjax as rx
from rlxjax.calibration import predict_for_target
from rlxjax.devices import CompiledFor, Link, target_device
from rlxjax.jaxpr import OperationCounts, register_rule
from rlxjax.models import TPU_KERNELS

ICI = Link(name="ICI", shape="torus", bytes_per_ns=45.0, latency_ns=1000.0, devices=256, wraps=16)
NVLINK = Link(name="NVLink", shape="switch", bytes_per_ns=450.0, latency_ns=2000.0, devices=8)
V5E = target_device("tpu-v5e").model_copy(update={"links": (ICI,), "call_ns": 8e4})
H100 = target_device("h100").model_copy(update={"links": (NVLINK,)})
ROWS = jax.ShapeDtypeStruct((1024, 8192), jnp.float32)
TEXT = "ENTRY %main (x: f32[1024,8192]) -> f32[1024,8192] {{\n  %x = f32[1024,8192] parameter(0)\n{}\n}}"


@pytest.fixture
def predicted(monkeypatch, tmp_path):
    """A function that predicts a program of a text for a target."""
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    monkeypatch.setattr("rlxjax.jaxpr._function_profile.check_compiler", lambda platform: None)

    def predict(*lines, target=V5E, devices=1, fn=lambda x: x, args=(ROWS,)):
        text, size = TEXT.format("\n".join(f"  {line}" for line in lines)), 4 * 1024 * 8192
        made = CompiledFor(
            target=target,
            devices=devices,
            mesh={} if devices == 1 else {"x": devices},
            coordinates=tuple((place % 2, place // 2) for place in range(devices)) if target is V5E else (),
            text=text,
            argument_bytes=size,
            output_bytes=size,
            temporary_bytes=0,
            alias_bytes=0,
            peak_bytes=2 * size,
            costs={},
            compiler="a compiler 1.0",
            seconds=1.0,
        )
        monkeypatch.setattr("rlxjax.jaxpr._function_profile.compile_for", lambda *args, **kwargs: made)
        return predict_for_target(fn, *args, target=target)

    return predict


def cycles(count):
    return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


TANH = f"ROOT %z = f32[1024,8192] tanh(%x), {cycles(300_000)}"
SORT = "ROOT %z = f32[1024,8192] sort(%x), dimensions={1}, to_apply=%less"


# --- Kernels of TPUs -------------------------------------------------------------------------------


def test_a_kernel_without_cycles_has_a_time_and_a_wide_one(predicted):
    told, sort = predicted(TANH), predicted(SORT)
    # What goes over its arrays takes what memory takes; a product takes its cycles.
    median = TPU_KERNELS.prior.median
    memory_ns = 2 * 4 * ROWS.size / (median.memory_share * V5E.bandwidth_bytes_per_ns)
    assert told.device_ns == pytest.approx(memory_ns + median.kernel_ns, rel=0.03)
    cycles_ns = median.cycle_share * 3_000_000 / V5E.clock_ghz
    product = predicted(f"ROOT %z = f32[1024,1024] dot(%x, %x), lhs_contracting_dims={{1}}, {cycles(3_000_000)}")
    assert product.device_ns == pytest.approx(cycles_ns, rel=0.01)
    # All stages of a network of 2^13 elements go through the vector unit, in no less than its peak rate allows.
    least_ns = 13 * 14 / 2 * ROWS.size * 2 / (4096 * V5E.clock_ghz)
    assert sort.device_ns > least_ns > 1e5
    for found in (told, sort):
        assert found.low_ns < found.time_ns < found.high_ns < math.inf
        assert found.uncounted == ()
    assert sort.high_ns / sort.low_ns > 2 * told.high_ns / told.low_ns
    # Other kinds of kernels likewise: no program is cheaper with one more.
    others = (
        'custom-call(%x), custom_call_target="TopK"',
        "gather(%x, %x), slice_sizes={1,8192}",
        "reduce-window(%x, %x), window={size=1x128}",
        "copy(%x)",
    )
    for other in others:
        both = predicted(f"%y = f32[1024,8192] {other}", TANH)
        assert both.device_ns > told.device_ns + 1000, other
        assert "cycles of some instructions" in both.profile.target.left_out


def test_no_program_takes_less_than_its_bytes_and_its_products(predicted):
    few = predicted(f"ROOT %z = f32[1024,8192] tanh(%x), {cycles(10)}")
    assert few.device_ns >= few.roofline_ns * (1 - 1e-9)
    assert few.roofline_ns == 2 * 4 * ROWS.size / V5E.bandwidth_bytes_per_ns
    for kind, slowness in (("bf16", 1), ("f32", 1), ("s8", 197 / 393)):
        square = f"{kind}[8192,8192]"
        made = predicted(f"%a = {square} parameter(1)", f"ROOT %z = {square} dot(%a, %a), lhs_contracting_dims={{1}}")
        compute_ns = slowness * 2 * 8192**3 / V5E.matrix_flop_per_ns["bf16"]
        assert made.roofline_ns == pytest.approx(compute_ns, rel=0.01)
        assert made.device_ns >= made.roofline_ns * (1 - 1e-6)
        assert made.binds == "compute"


# --- Calls and steps -------------------------------------------------------------------------------


def test_a_call_is_the_device_and_the_host_of_every_target_and_a_loop_takes_the_longer_one(predicted):
    for target in (V5E, H100):
        long, short = predicted(*[TANH.replace("ROOT %z", f"%y{i}") for i in range(20)], TANH, target=target), None
        short = predicted(TANH.replace("300000", "30"), target=target, fn=lambda x: x + 1)
        for found in (long, short):
            assert found.device_ns + found.host_ns == pytest.approx(found.time_ns)
            assert found.host_ns > 1e4
            low, high = found.pipelined_interval_ns
            assert low < found.pipelined_ns < high
            assert found.device_ns <= found.pipelined_ns <= found.time_ns * 1.2
            assert sum(found.terms_ns.values()) == pytest.approx(found.time_ns)
            assert found.as_dict()["pipelined_ns"] == found.pipelined_ns
            assert "in a loop that does not wait" in str(found)
        assert long.pipelined_ns == pytest.approx(long.device_ns, rel=0.02)
        assert long.pipelined_ns < long.time_ns
        assert long.binds == "memory"


# --- Exchanges -------------------------------------------------------------------------------------

ALL = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"


def test_an_exchange_takes_time_and_what_runs_beside_hides_it(predicted):
    for target in (V5E, H100):
        alone = predicted(TANH, target=target, devices=8)
        assert "collectives_ns" not in alone.terms_ns
        waited = predicted(f"%g = f32[8192,8192] all-gather(%x), {ALL}", TANH, target=target, devices=8)
        start = f"%s = ((f32[1024,8192]), f32[8192,8192]) all-gather-start(%x), {ALL}"
        done = "%d = f32[8192,8192] all-gather-done(%s)"
        hidden = predicted(start, TANH.replace("ROOT %z", "%y"), done, TANH, target=target, devices=8)
        two = predicted(TANH.replace("ROOT %z", "%y"), TANH, target=target, devices=8)
        # Seven eighths of the bytes have to come in by the links of a device.
        links = 2 * ICI.bytes_per_ns if target is V5E else NVLINK.bytes_per_ns
        least_ns = 7 / 8 * 4 * 8 * ROWS.size / links
        assert least_ns < waited.terms_ns["collectives_ns"] < 2 * least_ns
        assert waited.device_ns == pytest.approx(alone.device_ns + waited.terms_ns["collectives_ns"])
        assert waited.binds == "collectives"
        assert hidden.device_ns - two.device_ns < waited.device_ns - alone.device_ns
        long = [f"%y{place} = f32[1024,8192] tanh(%x), {cycles(4_000_000)}" for place in range(60)]
        assert predicted(start, *long, done, TANH, target=target, devices=8).binds != "collectives"
        twice = predicted(*[f"%g{place} = f32[8192,8192] all-gather(%x), {ALL}" for place in (1, 2)], TANH, devices=8)
        assert twice.time_ns > predicted(TANH, devices=8).time_ns
    with pytest.raises(ValueError, match="expected data of links between devices") as refused:
        predicted(
            f"%g = f32[8192,8192] all-gather(%x), {ALL}", TANH, target=V5E.model_copy(update={"links": ()}), devices=8
        )
    assert "\n" not in str(refused.value)


# --- Kernels of users ------------------------------------------------------------------------------


def of_pallas(cost):
    from jax.experimental import pallas as pl

    def double(x):
        def kernel(source, result):
            result[...] = source[...] * 2

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=cost)(x)

    return double


KERNEL = 'ROOT %z = f32[1024,8192] custom-call(%x), custom_call_target="tpu_custom_call"'


def test_a_kernel_of_a_user_takes_what_its_author_says_or_at_least_what_is_known(predicted):
    from jax.experimental import pallas as pl

    unsaid = predicted(KERNEL, fn=of_pallas(None))
    assert unsaid.high_ns == math.inf
    assert "the work of the kernel tpu_custom_call is unknown" in unsaid.uncounted[0]
    assert str(unsaid).startswith("predicted: at least ")
    small, large = (
        predicted(
            KERNEL, fn=of_pallas(pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=2 * 4 * ROWS.size))
        )
        for flops in (10**6, 10**12)
    )
    for found in (small, large):
        assert found.uncounted == ()
        assert found.low_ns < found.time_ns < found.high_ns < math.inf
    roofline_ns = 10**12 / V5E.matrix_flop_per_ns["bf16"]
    assert roofline_ns < large.terms_ns["custom_ns"] < 3 * roofline_ns
    assert small.terms_ns["custom_ns"] < large.terms_ns["custom_ns"]


def test_register_rule_holds_for_targets(predicted):
    from jax.extend.core import Primitive

    def program(name):
        primitive = Primitive(name)
        primitive.def_abstract_eval(lambda x: x)
        return primitive.bind

    assert predicted(KERNEL, fn=program("untold_kernel")).high_ns == math.inf
    register_rule("told_kernel", lambda inputs, outputs, params: OperationCounts(flops=10**12, bytes=10**6))
    found = predicted(KERNEL, fn=program("told_kernel"))
    assert found.uncounted == ()
    assert found.terms_ns["custom_ns"] > 10**12 / V5E.matrix_flop_per_ns["bf16"]


# --- What is not whole -----------------------------------------------------------------------------


def test_what_does_not_fit_or_turns_unknown_times_has_no_upper_end(predicted):
    small = V5E.model_copy(update={"memory_bytes": 10**6})
    found = predicted(TANH, target=small)
    assert found.high_ns == math.inf
    assert "does not fit" in found.uncounted[-1]
    for target in (V5E, H100):
        fn = lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y + 1, x)  # noqa: E731
        profile = predicted(TANH, target=target, fn=fn).profile
        assert profile.unknown_loops == ()  # of the text
        loops = dataclasses.replace(profile, unknown_loops=rx.profile_function(fn, ROWS).unknown_loops)
        from rlxjax.calibration import times_for_target

        (one,) = times_for_target([loops], target).predictions
        assert one.high_ns == math.inf
