"""The router's journal in the chart."""

from __future__ import annotations

from tests.helm.charts import pod_templates, render
from tests.helm.test_render import configuration


def test_the_journal_has_a_volume_on_the_head_alone_and_is_written_there() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "journal"}}
    values = {"head": {"journalVolume": claim}}
    assert configuration(values).router.journal == "/var/lib/ringserve/journal"
    assert configuration().router.journal == "auto"
    for name, template in pod_templates(render(values)).items():
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        is_head = name == "head"
        assert ({"name": "journal", **claim} in template["spec"]["volumes"]) == is_head
        assert ({"name": "journal", "mountPath": "/var/lib/ringserve"} in mounts) == is_head
