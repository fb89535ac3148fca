"""Plans as one page that needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unison.planning.memory import in_units
from unison.report import Axis, Series, bar_plot, heading, line_plot, page, paragraph, table

#: The columns of the table of 1 to all devices.
SCALING = ("devices", "step", "waiting", "efficiency", "inside", "between")
#: The columns of the ways to run a step.
WAYS = ("way", "step", "efficiency", "memory", "fits", "how")

#: The note on a target whose own compiler is not installed.
COMPILED_FOR_CPUS = (
    "{}: compiled for CPUs, so memory, kernels and collectives are estimates. XLA's GPU compiler "
    "gives the real ones: pip install 'unison[plan-gpu]', or see UNISON_GPU_COMPILER."
)

#: Smaller parts of the largest bar are combined.
_VISIBLE = 0.01


def plans_page(plans: Sequence[Mapping[str, Any]]) -> str:
    """Returns plans of one step for several targets as HTML.

    Args:
        plans: What `StepPlan.as_dict` returned, of each.
    """
    parts = [
        paragraph(
            "An estimate, of what has not run: memory, operations and collectives are those of the "
            "compiled step; times come from rates that makers state and others measured, with the "
            "same number of examples on each device however many there are. Inside and between: "
            "the bytes that a device sends inside its machine, and a machine to others."
        )
    ]
    known = [plan for plan in plans if "scaling" in plan]
    if known:
        parts += _plots_of_time(known)
    parts.append(_plot_of_memory(plans))
    for plan in plans:
        parts += _told(plan)
    return page(f"Plan of {plans[0]['step']}", parts)


def _plots_of_time(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    def lines(value: Any) -> list[Series]:
        return [
            Series(
                plan["target"],
                [one["devices"] for one in plan["scaling"]],
                [value(one) for one in plan["scaling"]],
            )
            for plan in plans
        ]

    devices = Axis("devices", is_log=True)
    seconds = [one["seconds"] for plan in plans for one in plan["scaling"]]
    times = Axis("ms", is_log=max(seconds) > 10 * min(seconds))
    every = sorted({one["devices"] for plan in plans for one in plan["scaling"]})
    ideal = Series("no waiting", every, [100.0] * len(every), is_dashed=True)
    return [
        line_plot("Step time", devices, times, lines(lambda one: 1e3 * one["seconds"])),
        line_plot(
            "Scaling efficiency",
            devices,
            Axis("% of the time spent computing"),
            [*lines(lambda one: 100 * one["efficiency"]), ideal],
        ),
    ]


def _plot_of_memory(plans: Sequence[Mapping[str, Any]]) -> str:
    names = dict.fromkeys(name for plan in plans for name in plan["memory"]["state"])
    parts = {
        name.replace("_", " "): [plan["memory"]["state"].get(name, 0) / 2**20 for plan in plans]
        for name in names
    }
    for name in ("batch", "results", "code"):
        parts[name] = [plan["memory"][name] / 2**20 for plan in plans]
    parts["activations, buffers"] = [plan["memory"]["activations"] / 2**20 for plan in plans]
    parts["gradients"] = [
        (plan["memory"]["temporaries"] - plan["memory"]["activations"]) / 2**20 for plan in plans
    ]
    least = _VISIBLE * max(plan["memory"]["total"] for plan in plans) / 2**20
    seen = {name: sizes for name, sizes in parts.items() if max(sizes) >= least}
    small = [sizes for name, sizes in parts.items() if name not in seen]
    if any(map(any, small)):
        seen["other"] = [sum(sizes) for sizes in zip(*small, strict=True)]
    targets = [plan["target"] for plan in plans]
    return bar_plot("Memory of each device", Axis("MiB"), targets, seen)


def _told(plan: Mapping[str, Any]) -> list[str]:
    parts = [heading(plan["target"])]
    collectives = ", ".join(
        f"{one['runs']} {one['kind']} of {in_units(one['bytes'])}" for one in plan["collectives"]
    )
    parts.append(
        paragraph(
            f"A device computes {plan['flops']:.3g} floating-point operations a step and moves "
            f"{in_units(plan['bytes_accessed'])}. It takes {in_units(plan['memory']['total'])} of "
            f"memory. Collectives: {collectives or 'none'}." + _told_of_overlap(plan)
        )
    )
    if "scaling" not in plan:
        return parts
    parts[-1] += paragraph(
        f"A device has {in_units(plan['device']['memory'])}. {batch_that_fits(plan)}"
    )
    parts.append(table(SCALING, rows_of_scaling(plan)))
    parts.append(table(WAYS, rows_of_ways(plan)))
    return parts


def _told_of_overlap(plan: Mapping[str, Any]) -> str:
    if plan["is_estimate"]:
        return " " + COMPILED_FOR_CPUS.format(plan["target"])
    if plan["hidden_share"] is None:
        return ""
    return f" {plan['hidden_share']:.0%} of their bytes have work to hide behind."


def rows_of_scaling(plan: Mapping[str, Any]) -> list[list[str]]:
    """Returns the time of a planned step on 1 to all devices, as rows under `SCALING`.

    The last two are the bytes that a device sends inside its machine, and a machine to others.
    """
    return [
        [
            f"{one['devices']}",
            *(f"{1e3 * one[name]:.3g} ms" for name in ("seconds", "waiting")),
            f"{one['efficiency']:.0%}",
            in_units(one["sent"]["inside"]),
            in_units(one["sent"]["network"]),
        ]
        for one in plan["scaling"]
    ]


def rows_of_ways(plan: Mapping[str, Any]) -> list[list[str]]:
    """Returns the ways to run a planned step, as rows under `WAYS`; a star marks the preferred."""
    return [
        [
            way["name"] + (" *" if way["name"] == plan["preferred"] else ""),
            f"{1e3 * way['seconds']:.3g} ms",
            f"{way['efficiency']:.0%}",
            in_units(way["memory"]),
            "yes" if way["fits"] else "no",
            way["how"],
        ]
        for way in plan["choices"]
    ]


def batch_that_fits(plan: Mapping[str, Any]) -> str:
    """Returns a sentence about the global batch that fits; "" if its size is unknown."""
    if plan["largest_batch"] is None:
        return ""
    fitting, now = plan["largest_batch"], plan["examples"]
    return f"A global batch of {fitting:,} examples fits at least (now {now:,})."
