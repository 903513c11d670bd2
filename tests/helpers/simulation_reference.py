"""A simulation of a pipeline as plainly as possible: every worker waits for its next message, one operation a time."""

from collections import defaultdict


def reference(programs, placement, costs, cluster, seconds):
    """Return start and end of every operation (stage, kind, micro-batch) of one pipeline.

    `programs` has the operations of each worker in order. Messages that none of them sends have arrived at time 0.
    `seconds` maps a kind to the name of its cost.
    """
    stages = len(placement)
    sent_by = {(s, k, m) for program in programs for s, k, m in program}
    synthetic = any(k == "L" for _, k, _ in sent_by)
    clock = [0.0] * len(programs)
    free = defaultdict(float)
    arrival, times = {}, {}
    position = [0] * len(programs)
    while any(position[w] < len(program) for w, program in enumerate(programs)):
        moved = False
        for worker, program in enumerate(programs):
            if position[worker] == len(program):
                continue
            stage, kind, m = program[position[worker]]
            source = None
            if kind == "F" and stage > 0:
                source = stage - 1, "F", m
            if kind == ("L" if synthetic else "B") and stage < stages - 1:
                source = stage + 1, "B", m
            if source in sent_by and source not in arrival:
                continue
            start = max(clock[worker], arrival.get(source, 0.0))
            duration = getattr(costs[stage], seconds[kind])
            to = stage + 1 if kind == "F" else stage - 1 if kind == "B" else None
            remote_in = placement[source[0]] != worker if source else False
            remote_out = to is not None and 0 <= to < stages and placement[to] != worker
            end = start + duration + cluster.overhead * (remote_in + remote_out)
            times[stage, kind, m] = start, end
            clock[worker] = end
            if to is not None:
                arrival[stage, kind, m] = end
                if remote_out:
                    link = cluster.between(worker, placement[to])
                    size = costs[stage].forward_bytes if kind == "F" else costs[stage].backward_bytes
                    free[worker, placement[to]] = max(free[worker, placement[to]], end) + size / link.bandwidth
                    arrival[stage, kind, m] = free[worker, placement[to]] + link.latency
                    if not cluster.overlap:
                        clock[worker] = free[worker, placement[to]]
            position[worker] += 1
            moved = True
        assert moved, "deadlock"
    return times
