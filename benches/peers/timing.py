"""Device time of calls, measured as `hk bench` does: the median over passes, each between two events.

A pass calls a function once for each of several copies of its operands, which exceed every cache together, or 50 times for
one copy. Passes are CUDA graphs, so that Python is not in the time. A function that cannot be captured is launched call by
call behind a kernel that keeps the device busy until all calls of the pass are queued.
"""

import math
import statistics
import time

import torch

# As `Plan::of`, `MOST_COPIES` and `CACHED_CALLS` of crates/hk-testkit/src/measure.rs.
FOOTPRINT = 512 << 20
MOST_COPIES = 2048
CACHED_CALLS = 50
WARM_UP_S = 0.05


def tensors(value):
    """The tensors in the operands or results of a call."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [t for v in value for t in tensors(v)] if value is not None and not isinstance(value, (str, int, float)) else []


def size(value):
    return sum(t.numel() * t.element_size() for t in tensors(value))


def copies_of(operands, bytes_moved):
    """The operands, and copies of them."""
    n = min(max(math.ceil(FOOTPRINT / max(bytes_moved, 1)), 1), MOST_COPIES)
    return [operands] + [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in operands.items()} for _ in range(n - 1)]


def captured(calls, keep):
    """The calls as a graph. What they give is kept apart from each other if `keep` is set."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    results = []
    with torch.cuda.graph(graph):
        for call in calls:
            result = call()
            if keep:
                results.append(result)
    return graph.replay, results


def queued(calls):
    """The calls one by one, behind a wait that is longer than Python needs for all of them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for call in calls:
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    cycles = int(2e9 * (2 * seconds + 1e-4))

    def wait():
        torch.cuda._sleep(cycles)

    def run():
        for call in calls:
            call()

    return wait, run


def sample(calls, samples, keep):
    """Median microseconds of a call, and whether by a graph."""
    try:
        run, results = captured(calls, keep)
        wait, method = None, "graph"
    except Exception:
        torch.cuda.synchronize()
        # More would not fit the queue of launches.
        calls = calls[:50]
        (wait, run), results, method = queued(calls), [], "stream"
    start = time.perf_counter()
    passes = 0
    while passes == 0 or time.perf_counter() - start < WARM_UP_S:
        run()
        torch.cuda.synchronize()
        passes += 1
    pairs = []
    for _ in range(affordable((time.perf_counter() - start) / passes, samples)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if wait:
            torch.cuda.synchronize()
            wait()
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    del results
    return statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3 / len(calls), method


def affordable(seconds, wanted):
    """Repetitions of something that takes so long: as many as asked for, or those of ten seconds, but at least ten."""
    return max(min(wanted, max(int(10 / max(seconds, 1e-9)), 10)), 1)


def with_host(calls, passes=5):
    """Median microseconds of a call on the host's clock, each launched by itself: until queued, and until done."""
    sync()
    start = time.perf_counter()
    calls[0]()
    sync()
    n = affordable(10 * (time.perf_counter() - start), max(200, len(calls)))
    times = []
    for _ in range(passes):
        sync()
        start = time.perf_counter()
        for i in range(n):
            calls[i % len(calls)]()
        queued = time.perf_counter() - start
        sync()
        times.append((queued * 1e6 / n, (time.perf_counter() - start) * 1e6 / n))
    return (statistics.median(column) for column in zip(*times))


def sync():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(function, operands, samples):
    """Times of `function(**operands)`, as columns of the table of peers."""
    result = function(**operands)
    moved = size(operands) + size(result)
    del result
    calls = [lambda o=o: function(**o) for o in copies_of(operands, moved)]
    device_us, method = sample(calls, samples, keep=True)
    launch_us, host_us = with_host(calls)
    first = calls[0]
    del calls
    cached_us, _ = sample([first] * CACHED_CALLS, samples, keep=False)
    return {"device_us": device_us, "cached_us": cached_us, "launch_us": launch_us, "host_us": host_us, "method": method}
