"""Hosts and slots from every place that tells them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_train.errors import UserError
from hpc_train.launch.hosts import (
    Host,
    allocated,
    compress,
    expand,
    parse_hosts,
    read_file,
    take_hosts,
)

NAMES = ["node1", "node2", "gpu-03", "x.example.org"]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 64)), min_size=1, max_size=4))
def test_the_option_and_the_file_give_the_same_hosts(tmp_path_factory, pairs):
    hosts = [Host(*pair) for pair in dict(pairs).items()]
    path = tmp_path_factory.mktemp("hosts") / "file"
    writings = [
        "".join(f"{host.name} slots={host.slots}\n" for host in hosts),
        "# all\n\n" + "".join(f"{host.name}:{host.slots}  # ours\n" for host in hosts),
        "".join(f"{host.name}\n" * host.slots for host in hosts),
        "".join(f"{host.name} max_slots=99 slots = {host.slots}\n" for host in hosts),
    ]
    for text in writings:
        path.write_text(text)
        assert read_file(path) == hosts
    assert parse_hosts(",".join(f"{host.name}:{host.slots}" for host in hosts)) == hosts


@pytest.mark.parametrize("text", ["", "a:0", "a:4,", "a:b", "a;reboot:2", "a:2,a:2", "$(x):1"])
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(UserError, match="-H"):
        parse_hosts(text)


@pytest.mark.parametrize("text", ["", "# none\n", "node1 slots=\n", "node1 slots=0\n", "a b c\n"])
def test_what_is_no_host_file_is_refused(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(UserError, match="host file"):
        read_file(tmp_path / "file")


def test_a_host_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"host file .*none"):
        read_file(tmp_path / "none")


@example(["n0-ib", "n8", "n09"])
@given(
    st.lists(
        st.one_of(
            st.from_regex(r"(n|nid0|gpu-|r1n)[0-9]{1,3}(-ib|\.x2\.org|)", fullmatch=True),
            st.sampled_from(["login", "a-b", "n08", "n09", "n10", "n9", "n099", "n100"]),
        ),
        min_size=1,
        unique=True,
    )
)
def test_host_lists_are_made_and_read_alike(names):
    assert expand(compress(names)) == names


def test_host_lists_are_short():
    assert compress(["n1", "n2", "n3", "n07", "login"]) == "n[1-3,07],login"
    assert compress(f"n{number}" for number in range(1, 9001)) == "n[1-9000]"
    assert compress(f"gpu{number:02}-ib" for number in range(8, 12)) == "gpu[08-11]-ib"


def test_host_lists_of_slurm():
    assert expand("node1") == ["node1"]
    assert expand("n[1-3,07],gpu[09-11]-ib") == [
        *("n1", "n2", "n3", "n07"),
        *("gpu09-ib", "gpu10-ib", "gpu11-ib"),
    ]
    assert expand("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]
    for wrong in ("", "n[3-1]", "n[1", "n[a-b]"):
        with pytest.raises(UserError, match="host list"):
            expand(wrong)


def test_schedulers_tell_their_hosts(tmp_path):
    slurm = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "2(x3),1"}
    found = allocated(slurm)
    assert found.scheduler == "slurm"
    assert found.hosts == [Host("n1", 2), Host("n2", 2), Host("n3", 2), Host("n4", 1)]

    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\nn2\n")  # PBS Pro's mpiprocs and Torque's ppn: a line for each
    assert allocated({"PBS_NODEFILE": str(nodes)}).hosts == [Host("n1", 2), Host("n2", 2)]

    assert allocated({"LSB_MCPU_HOSTS": "n1 4"}).hosts == [Host("n1", 4)]
    assert allocated({"LSB_MCPU_HOSTS": "n1 1 n2 4 n1 2"}).hosts == [Host("n1", 3), Host("n2", 4)]
    assert allocated({"LSB_MCPU_HOSTS": ""}) is None
    assert allocated({}) is None


@pytest.mark.parametrize("variable", ["LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE"])
@pytest.mark.parametrize("there", [True, False])
def test_the_first_host_of_lsf_has_no_rank_where_jsrun_is(tmp_path, variable, there):
    (tmp_path / "hosts").write_text("n0\nn1\nn1\nn2\nn2\n")
    values = {"LSB_MCPU_HOSTS": "n0 1 n1 2 n2 2", "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}
    if there:
        (tmp_path / "jsrun").touch(0o755)
    found = allocated({variable: values[variable], "PATH": str(tmp_path)}).hosts
    assert found == [*([] if there else [Host("n0", 1)]), Host("n1", 2), Host("n2", 2)]


def test_variables_that_contradict_each_other_are_refused():
    with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE"):
        allocated({"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "2(x3)"})


def test_no_more_hosts_are_taken_than_the_ranks_need():
    hosts = [Host("a", 2), Host("b", 2), Host("c", 2)]
    assert take_hosts(hosts, 3) == [Host("a", 2), Host("b", 1)]
    assert take_hosts(hosts, 6) == hosts
    with pytest.raises(UserError, match="-np 7 is more than the 6 slots of 3 hosts"):
        take_hosts(hosts, 7)
