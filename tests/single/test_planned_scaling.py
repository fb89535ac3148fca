"""The model of planned steps: its formulas, and results that others published."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest

from unison.planning import (
    Cluster,
    Exchange,
    Workload,
    all_reduce_seconds,
    cluster_named,
    scaling,
    step_time,
)
from unison.planning.hardware import device_named, link_named, links_between, names

PUBLISHED = tomllib.loads((Path(__file__).parents[1] / "published_scaling.toml").read_text())
RESULTS = {name: told for name, told in PUBLISHED.items() if name != "sources"}


def cluster_of(told: dict) -> Cluster:
    kind, _, count = told["cluster"].partition(":")
    if kind in names("devices", "tpu"):
        link = links_between(kind)
        return Cluster(told["cluster"], device_named(kind), 1, int(count), link, link)
    cluster = cluster_named(told["cluster"], told["network"])
    return cluster._replace(inside=link_named(told["inside"]))


def predicted(told: dict) -> float:
    cluster = cluster_of(told)
    exchange = Exchange(told["bucket_bytes"], told.get("algorithm", "ring"))

    def images_per_second(part: Cluster, batch: int) -> float:
        workload = Workload(
            batch / told["images_per_second"],
            told["parameters"] * told.get("gradient_bytes", 4),
            tuple(map(tuple, told.get("ready", ((0, 0), (1, 1))))),
        )
        return batch / step_time(workload, part, exchange).seconds

    reference = told.get("reference_batch", told["batch"])
    alone = images_per_second(cluster.of(told.get("relative_to", 1)), reference)
    return images_per_second(cluster, told["batch"]) / alone


@pytest.mark.parametrize("name", [name for name, told in RESULTS.items() if "is_worse" not in told])
def test_a_published_efficiency_is_found_within_a_fifth(name):
    told = RESULTS[name]
    assert predicted(told) == pytest.approx(told["efficiency"], rel=0.2)


@pytest.mark.parametrize("name", [name for name, told in RESULTS.items() if "is_worse" in told])
def test_what_is_said_to_be_foretold_worse_is_foretold_too_well(name):
    told = RESULTS[name]
    assert 1.2 < predicted(told) / told["efficiency"] < 1.4


DOCUMENTED = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()


@pytest.mark.parametrize("name", RESULTS)
def test_the_documentation_tells_what_is_foretold(name):
    told = RESULTS[name]
    words = f"{told['efficiency']:.0%} | {predicted(told):.0%} |".replace("%", " %")
    assert words in DOCUMENTED


@pytest.mark.parametrize("told", RESULTS.values(), ids=RESULTS)
def test_published_input_is_complete_and_named(told):
    assert all(name in PUBLISHED["sources"] for name in ("efficiency", "images_per_second"))
    assert {"cluster", "batch", "images_per_second", "parameters"} <= set(told)


def test_a_ring_sends_twice_the_bytes_and_waits_for_every_message():
    cluster = cluster_named("p100:8")
    link = cluster.inside
    messages = 2 * 7 * link.latency + 8.4e-6
    assert all_reduce_seconds(0, cluster) == pytest.approx(messages)
    bytes_of_it = all_reduce_seconds(1e9, cluster) - messages
    assert bytes_of_it == pytest.approx(2 * 7 / 8 * 1e9 / link.rate)


def test_a_tree_waits_for_fewer_messages_on_many_machines():
    cluster = cluster_named("h100:128x8")
    assert all_reduce_seconds(1e3, cluster, "tree") < all_reduce_seconds(1e3, cluster) / 10
    in_tree = 2 * (7 * cluster.inside.latency + math.log2(128) * cluster.network.latency) + 8.4e-6
    assert all_reduce_seconds(0, cluster, "tree") == pytest.approx(in_tree)


def test_a_hierarchy_sends_between_machines_what_one_device_would():
    cluster = cluster_named("h100:2x8", "ethernet-1g-tcp")
    seconds = all_reduce_seconds(1e9, cluster, "hierarchical")
    between = 1e9 / cluster.network.rate
    inside = 2 * 7 / 8 * 1e9 / cluster.inside.rate
    assert seconds == pytest.approx(between + inside, rel=0.01)


def test_one_device_sends_nothing():
    assert all_reduce_seconds(1e9, cluster_named("h100:1")) == 0
    assert [one.devices for one in scaling(Workload(1, 1), cluster_named("h100:3x8"))] == [
        *(1, 2, 4, 8, 16),
        24,
    ]
