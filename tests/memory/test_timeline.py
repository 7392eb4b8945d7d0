"""Reading a profiler's trace, on traces made by hand whose numbers were counted by hand."""

import pytest

from zero_mini.memory.timeline import Kernel, length, read, summary, union


def event(name: str, start: float, duration: float, stream: int = 7, category: str = "kernel") -> dict:
    return {"name": name, "cat": category, "ts": start, "dur": duration, "args": {"stream": stream}}


# microseconds   0        1000       2000       3000       4000       5000
# compute        [ matmul ]          [  matmul  ]                 [adam]
# wire               [  gather  ]                 [ reduce ]
TRACE = {
    "traceEvents": [
        {"name": "process_name", "ph": "M"},
        event("cudaLaunchKernel", 0, 9000, category="cuda_runtime"),
        event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 3000, 1000, stream=20),
        event("nvjet_tst_192x208_64x4", 0, 1000),
        event("ncclDevKernel_AllGather_RING_LL", 500, 1000, stream=20),
        event("sm90_xmma_gemm_bf16bf16", 2000, 1000),
        event("void multi_tensor_apply_kernel<FusedAdamMathFunctor>", 4500, 500),
        event("Memcpy DtoD (Device -> Device)", 5000, 100, category="gpu_memcpy"),
    ]
}


def test_read_keeps_what_ran_on_the_gpu_in_order_of_start():
    kernels = read(TRACE)
    assert [kernel.start for kernel in kernels] == [0, 500, 2000, 3000, 4500, 5000]
    assert [kernel.kind for kernel in kernels] == ["matmul", "collective", "matmul", "collective", "optimizer", "copy"]
    assert kernels[1] == Kernel("ncclDevKernel_AllGather_RING_LL", 20, 500, 1500)


def test_summary_of_a_trace_counted_by_hand():
    found = summary(read(TRACE))
    assert found["kernels"] == 6
    assert found["collectives"] == 2
    assert found["overlapping_compute"] == 1
    assert found["overlapping_a_matmul"] == 1  # the reduction begins as the second product ends
    assert found["exposed_ms"] == pytest.approx(0.5 + 1.0)  # the gather's second half, the whole reduction
    assert found["idle_ms"] == pytest.approx(0.5 + 0.5)  # before the second product, before the update
    assert found["span_ms"] == pytest.approx(5.1)
    busy = {"collective": 2.0, "copy": 0.1, "matmul": 2.0, "optimizer": 0.5}
    assert found["busy_ms"] == pytest.approx(busy)


def test_a_wire_that_works_beside_compute_all_the_time_exposes_nothing():
    kernels = read({"traceEvents": [event("gemm", 0, 10), event("ncclX", 2, 3, stream=9)]})
    assert summary(kernels)["exposed_ms"] == summary(kernels)["idle_ms"] == 0
    assert summary(kernels)["overlapping_a_matmul"] == 1


def test_two_collectives_at_a_time_are_exposed_once():
    kernels = read({"traceEvents": [event("ncclA", 0, 2000, stream=9), event("ncclB", 1000, 2000, stream=10)]})
    assert summary(kernels)["exposed_ms"] == pytest.approx(3.0)


def test_nothing_recorded_is_a_summary_of_zeros():
    found = summary(read({"traceEvents": []}))
    assert found["span_ms"] == found["idle_ms"] == found["exposed_ms"] == found["kernels"] == 0


@pytest.mark.parametrize(
    "spans, joined, covered",
    [
        ([], [], 0),
        ([(0, 1), (1, 2)], [(0, 2)], 2),  # they touch
        ([(0, 9), (1, 2), (3, 4)], [(0, 9)], 9),  # one around the others
        ([(5, 6), (0, 1)], [(0, 1), (5, 6)], 2),
    ],
)
def test_union_joins_what_touches(spans, joined, covered):
    assert union(spans) == joined
    assert length(spans) == covered
