from __future__ import annotations

import numpy as np

from hpc_train.host.memory import PeakMemory, free_bytes

MB = 1 << 20


def test_the_peak_counts_what_is_freed_again():
    peak = PeakMemory()
    peak.take()  # the tests before this one may have needed more
    before = peak.take()
    held = np.ones(200 * MB, np.uint8)
    del held
    after = peak.take()
    assert 150 * MB < after - before < 300 * MB
    assert peak.take() < after - 150 * MB, "the peak is counted anew"


def test_cgroups_limit_what_is_free(tmp_path):
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    group = root / "job" / "step"
    group.mkdir(parents=True)
    own.write_text("0::/job/step\n")
    everything = free_bytes(root, own)
    (root / "job" / "memory.max").write_text(f"{50 * MB}\n")
    (root / "job" / "memory.current").write_text(f"{30 * MB}\n")
    (root / "job" / "memory.stat").write_text(
        f"anon 1\nshmem {9 * MB}\ninactive_file {5 * MB}\nactive_file {8 * MB}\n"
        f"file_dirty {2 * MB}\nfile_writeback {MB}\n"
    )
    (group / "memory.max").write_text("max\n")
    assert free_bytes(root, own) == 30 * MB < everything


def test_older_cgroups_limit_it_too(tmp_path):
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    group = root / "memory" / "job"
    group.mkdir(parents=True)
    own.write_text("9:cpu:/other\n3:memory:/job\n")
    (group / "memory.limit_in_bytes").write_text(f"{40 * MB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{10 * MB}\n")
    (group / "memory.stat").write_text(
        f"dirty 9\ntotal_inactive_file 0\ntotal_active_file {4 * MB}\ntotal_dirty {MB}\n"
    )
    assert free_bytes(root, own) == 33 * MB


def test_in_a_container_the_limit_is_that_of_the_root(tmp_path):
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    root.mkdir()
    own.write_text("0::/\n")
    (root / "memory.max").write_text(f"{50 * MB}\n")
    (root / "memory.current").write_text(f"{20 * MB}\n")
    (root / "memory.stat").write_text("inactive_file 0\n")
    assert free_bytes(root, own) == 30 * MB
