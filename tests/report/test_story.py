"""Starts and their ends, from what the processes, the launcher and the job script wrote."""

from __future__ import annotations

from hpc_train.report.story import read_samples, read_story
from tests.report.runs import BEGIN, start, write_lines


def test_a_failure_tells_its_cause_and_the_steps_that_it_lost(tmp_path):
    end = {"time": BEGIN + 50, "event": "end", "step": 47, "reason": "failed", "why": "SIGKILL"}
    write_lines(tmp_path / "events.jsonl", [start(0, 0), end, start(60, 40)])
    first, second = read_story(tmp_path).starts
    assert (first.cause, first.failed, first.last, first.lost) == ("failed: SIGKILL", True, 47, 7)
    assert (second.after, second.ended, second.lost) == (40, None, None)


def test_a_killed_start_is_known_by_the_record_that_the_next_one_dropped(tmp_path):
    resumed = start(60, 50, reached=75, reached_time=BEGIN + 40)
    write_lines(tmp_path / "events.jsonl", [start(0, 0), resumed, start(90, 50)])
    first, second, third = read_story(tmp_path).starts
    assert (first.last, first.lost, first.heard, first.ended) == (75, 25, BEGIN + 40, None)
    assert (second.last, second.lost, second.followed) == (None, None, True), "nothing was dropped"
    assert (third.lost, third.followed) == (None, False)


def test_an_end_before_the_checkpoint_that_the_next_start_had_tells_no_lost_steps(tmp_path):
    end = {"time": BEGIN + 50, "event": "end", "step": 100, "reason": "failed", "why": "no"}
    write_lines(tmp_path / "events.jsonl", [start(0, 0), end, start(60, 150)])
    assert [one.lost for one in read_story(tmp_path).starts] == [None, None]


def test_a_start_that_was_refused_does_not_end_the_one_before_it(tmp_path):
    refused = {"time": BEGIN + 70, "event": "end", "step": 40, "reason": "failed", "why": "no"}
    write_lines(tmp_path / "events.jsonl", [start(0, 0), refused | {"before_start": True}])
    first, second = read_story(tmp_path).starts
    assert (first.ended, first.failed) == (None, False), "it was killed"
    assert (second.after, second.ended, second.cause) == (None, BEGIN + 70, "failed: no")


def test_a_launcher_that_knows_no_step_says_none(tmp_path):
    write_lines(tmp_path / "events.jsonl", [start(1, 0)])
    attempt = [
        {"time": BEGIN, "event": "start", "restart": 0},
        {"time": BEGIN + 50, "event": "end", "code": 137, "cause": "host b died", "step": -1},
    ]
    write_lines(tmp_path / "launch.jsonl", attempt)
    assert read_story(tmp_path).starts[0].last is None


def test_what_a_killed_start_could_not_say_is_in_the_launchers_file(tmp_path):
    write_lines(tmp_path / "events.jsonl", [start(5, 0), start(125, 30)])
    write_lines(
        tmp_path / "launch.jsonl",
        [
            {"time": BEGIN, "event": "start", "restart": 0},
            {"time": BEGIN + 50, "event": "end", "code": 137, "cause": "host b died", "step": 33},
            {"time": BEGIN + 60, "event": "start", "restart": 1},
            {"time": BEGIN + 70, "event": "end", "code": 1, "cause": "no module", "step": 30},
            {"time": BEGIN + 120, "event": "start", "restart": 2},
        ],
    )
    starts = read_story(tmp_path).starts
    assert [(one.after, one.cause) for one in starts] == [
        (0, "host b died"),
        (None, "no module"),  # an attempt that ended before it trained
        (30, ""),
    ]


def test_steps_are_lost_although_an_attempt_between_did_not_train(tmp_path):
    test_what_a_killed_start_could_not_say_is_in_the_launchers_file(tmp_path)
    assert [one.lost for one in read_story(tmp_path).starts] == [3, None, None]


def test_a_second_launcher_that_is_refused_hides_no_cause_of_the_first_one(tmp_path):
    write_lines(tmp_path / "events.jsonl", [start(5, 0)])
    refused = {"time": BEGIN + 38, "event": "end", "code": 2, "cause": "", "seconds": 18.0}
    killed = {"time": BEGIN + 50, "event": "end", "code": 137, "cause": "SIGKILL", "seconds": 50.0}
    begun = [{"time": BEGIN + after, "event": "start", "restart": 0} for after in (0, 20)]
    write_lines(tmp_path / "launch.jsonl", [*begun, refused, killed | {"step": 33}])
    first, second = read_story(tmp_path).starts
    assert (first.cause, first.ended, first.last) == ("SIGKILL", BEGIN + 50, 33)
    assert (second.after, second.ended, second.cause) == (None, BEGIN + 38, "exit code 2")


def test_a_record_may_know_a_later_step_than_the_launcher(tmp_path):
    resumed = start(60, 50, reached=94, reached_time=BEGIN + 40)
    write_lines(tmp_path / "events.jsonl", [start(0, 0), resumed])
    end = {"time": BEGIN + 50, "event": "end", "code": 137, "cause": "SIGKILL", "step": 92}
    write_lines(tmp_path / "launch.jsonl", [{"time": BEGIN - 1, "event": "start"}, end])
    first = read_story(tmp_path).starts[0]
    assert (first.last, first.lost) == (94, 44)


def test_the_job_script_says_why_a_job_ended(tmp_path):
    write_lines(tmp_path / "events.jsonl", [start(0, 0), start(90, 20, job="slurm::18")])
    ended = {"time": BEGIN + 80, "event": "ended", "job": "17", "code": 137, "why": "out of memory"}
    write_lines(tmp_path / "jobs.jsonl", [ended])
    first, second = read_story(tmp_path).starts
    assert (first.cause, first.failed, first.ended) == ("out of memory", True, BEGIN + 80)
    assert second.ended is None


def test_a_slow_rank_is_counted_over_its_steps(tmp_path):
    def slow(step, rank, seconds):
        values = {"rank": rank, "host": "b", "cause": "load", "why": f"at {step}"}
        return {"time": BEGIN, "event": "slow", "step": step, "seconds": seconds} | values

    write_lines(tmp_path / "events.jsonl", [slow(1, 3, 0.1), slow(2, 3, 0.4), slow(9, 1, 0.2)])
    first, second = read_story(tmp_path).slow
    assert (first.rank, first.times, first.first, first.last, first.worst) == ("3", 2, 1, 2, 0.4)
    assert first.why == "at 2"
    assert second.rank == "1"


def test_a_rank_is_slow_now_if_it_was_named_since_the_newest_start(tmp_path):
    slow = {"time": BEGIN, "event": "slow", "step": 9, "rank": 3, "host": "second", "seconds": 1.0}
    write_lines(tmp_path / "events.jsonl", [start(0, 0), slow, start(9, 9), slow | {"rank": 1}])
    assert read_story(tmp_path).slow_now == {"1"}


def test_starts_keep_their_order_if_a_clock_is_behind(tmp_path):
    ended = {"time": BEGIN + 50, "event": "end", "step": 20, "reason": "failed", "why": "no"}
    write_lines(tmp_path / "events.jsonl", [start(0, 0), ended, start(-3600, 20)])
    attempt = [{"time": BEGIN - 9000, "event": "start"}, {"time": BEGIN - 8000, "event": "end"}]
    write_lines(tmp_path / "launch.jsonl", attempt)
    assert [(one.after, one.lost) for one in read_story(tmp_path).starts] == [
        (None, None),
        (0, 0),
        (20, None),
    ]


def test_the_newest_samples_are_kept(tmp_path):
    write_lines(tmp_path / "samples.jsonl", [{"step": n, "text": "x" * 9000} for n in range(50)])
    samples = read_samples(tmp_path)
    assert [samples[0]["step"], samples[-1]["step"]] == ["30", "49"]
    assert len(samples[0]["text"]) == 4000


def test_a_run_without_files_has_no_story(tmp_path):
    assert read_story(tmp_path).starts == []
    (tmp_path / "events.jsonl").write_text(
        '[]\n7\nnull\n{"event": "end"}\n{"event": ["start"]}\n{"ev'
    )
    assert read_story(tmp_path).starts == []
