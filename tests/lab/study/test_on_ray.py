"""A study on a Ray cluster of two nodes, one of which is killed in the middle of a run:
``make ray-test``."""

from __future__ import annotations

import threading
import time

import pytest

from normcontrol.lab.studies.opening import begin
from normcontrol.lab.study.runner import Runner

pytestmark = pytest.mark.slow


@pytest.fixture
def two_nodes(tmp_path):
    """A cluster on this machine, and its second node; its tasks train in the folder "second"."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    (tmp_path / "second").mkdir()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=1, env_vars={"TMPDIR": str(tmp_path / "second")})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def begun(folder):
    """The runs in a folder that have made some steps."""
    return [path for path in folder.glob("*/*/metrics.jsonl") if path.stat().st_size > 0]


def numbers(ledger):
    return {i: (r.status, r.final, r.curves) for i, r in ledger.results().items()}


def test_with_a_node_killed_in_the_middle_the_numbers_are_those_without_ray(
    config, study, tmp_path, two_nodes
):
    cluster, second = two_nodes
    longer = config.with_(steps=800, log_every=10, eval_every=400)  # longer than a kill takes
    longer.save(tmp_path / "base.json")  # from which the study starts
    local, on_ray = (begin(tmp_path / name, study, "tiny") for name in ("local", "ray"))
    Runner(local, device="cpu").run()
    lost = []

    def kill():
        deadline = time.monotonic() + 120
        while not (lost or time.monotonic() > deadline):
            lost.extend(begun(tmp_path / "second"))
            time.sleep(0.01)
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = Runner(on_ray, device="cpu", on="ray", workers=2).run()
    killer.join()
    assert lost, "no run had begun on the second node"
    assert any(path.exists() for path in lost), "the run had ended before its node was killed"
    assert (outcome.done, outcome.left, outcome.stopped) == (6, 0, "")
    assert numbers(on_ray) == numbers(local)
