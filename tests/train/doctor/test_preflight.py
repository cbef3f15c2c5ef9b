"""Preflight: each check in each colour that it can have, and none but green on a sound configuration."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.fakes.models import mixtures
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.store import Store, format_cut
from rollbook.store.errors import TrainError
from rollbook.store.events.routed_experts import pack
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import Connection
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.doctor.check import Check
from rollbook.train.doctor.preflight import kept_share, preflight, read_recorded, rewards
from rollbook.train.doctor.reward_function import statistics_of
from rollbook.train.model.memory import parameters
from rollbook.train.model.shape import read_shape
from rollbook.train.select.references import References, find_references

MEMORY = 8 << 30
SOUND = [
    *("model", "memory", "batch", "normalization", "kl", "parts", "staleness", "correction"),
    *("data", "rewards"),
    *("difficulty", "evaluation"),
]


def _checks(log: Store | None, source: str = "cut", memory: int = MEMORY, **changes: Any) -> dict[str, Check]:
    config = fabric.config(fabric.GRPO, **changes)
    cut = {} if log is None else log.head()
    return {check.name: check for check in preflight(config, log, cut, source, memory)}


@pytest.fixture(scope="module")
def log(recorded_path: Path) -> Store:
    """The recorded store, which preflight only reads."""
    return rb.open(recorded_path)


def test_a_sound_configuration(log: Store) -> None:
    """Nothing is red or yellow, and what is there is said with its numbers."""
    checks = _checks(log)
    assert list(checks) == SOUND
    assert {check.verdict for check in checks.values()} == {"green"}
    assert checks["batch"].said == "8 trajectories a rollout batch, in 2 groups; one step on each"
    assert checks["normalization"].said == (
        "baseline group_mean, deviation unbiased, whitening none, reward_normalization none, "
        "normalizer token_mean"
    )
    assert checks["kl"].said == "no KL term over 3 steps; most trainings do without one"
    assert checks["rewards"].said == (
        "from source 'agent': 24 rewards, mean 0.75, deviation 0.559, most often 0 (25%)"
    )
    assert checks["difficulty"].said == "0 of 6 groups have one reward throughout"


def _algorithm(**keys: Any) -> dict[str, Any]:
    return {"algorithm": {"name": "grpo", "groups": 2, "group_size": 4} | keys}


TAIL = {"source": "tail"}
FRESH = {"recipe": {"max_staleness": 0}}
STALE = {"recipe": {"max_staleness": 2}}
SINGLE = {"group_size": 1, "groups": 8, "baseline": "none", "deviation": "none"}
TRAINER = {"old": "trainer"}
DRIFT = [{"metric": "old_kl", "above": 0.1}]
CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"model": "/nowhere"}, "model", "red", "/nowhere"),
    ({"memory": 1 << 18}, "memory", "red", "0.00 GiB of state"),
    ({"memory": 1_200_000}, "memory", "yellow", "0.00 GiB of state"),
    (_algorithm(group_size=2), "batch", "yellow", "groups of 2: a baseline of so few says little"),
    (_algorithm(groups=1), "batch", "yellow", "gradients of so few are noise"),
    (_algorithm(mini_batches=9) | {"steps": 9}, "batch", "yellow", "9 mini-batches share 8 trajectories"),
    (_algorithm(group_size=5), "batch", "red", "the largest group recorded has 4 trajectories, where 5"),
    (_algorithm(group_size=5) | TAIL, "batch", "yellow", "the largest group recorded has 4 trajectories"),
    (_algorithm(**SINGLE), "normalization", "yellow", "rewards are compared with nothing"),
    (_algorithm(**SINGLE, whitening="mean"), "normalization", "green", "whitening mean"),
    (_algorithm(**SINGLE, reward_normalization="batch"), "normalization", "green", "baseline none"),
    ({"algorithm": {"name": "ppo", "groups": 8}}, "normalization", "green", "baseline none"),
    (_algorithm(whitening="unbiased"), "normalization", "yellow", "by their group's deviation, and again"),
    (_algorithm(normalizer="constant", constant_length=2), "normalization", "yellow", "constant_length 2 is"),
    (_algorithm(normalizer="constant", constant_length=99), "normalization", "green", "normalizer constant"),
    (_algorithm(reward_clip=[-9, -1]), "normalization", "red", "makes all rewards equal: they are 0 to 1.5"),
    (_algorithm(reward_clip=[1, 9]), "normalization", "yellow", "cuts most rewards off"),
    (_algorithm(reward_clip=[0, 1]), "normalization", "green", "baseline group_mean"),
    (_algorithm(kl=0.1), "kl", "green", "held to version 0, weight 0.1 in the loss and 0 in the reward"),
    (_algorithm(kl=0.1, reference_version=7), "kl", "red", "of which there is no checkpoint"),
    (_algorithm(kl=0.1, reward_kl=0.1), "kl", "yellow", "counts twice"),
    (_algorithm(kl=0.1, kl_estimator="k1"), "kl", "yellow", "k1 in the loss has a gradient of 0 on average"),
    (_algorithm(reward_kl=0.1, kl_estimator="k1"), "kl", "green", "0.1 in the reward"),
    ({"steps": 499}, "kl", "green", "no KL term over 499 steps"),
    ({"steps": 500}, "kl", "yellow", "no [[stop]] rule watches it"),
    ({"steps": 500, "stop": DRIFT}, "kl", "green", "a [[stop]] rule watches old_kl"),
    (TAIL, "staleness", "yellow", "nothing limits how old samples are"),
    (TAIL | STALE, "staleness", "green", "max_staleness 2"),
    (STALE | _algorithm(epochs=4) | {"steps": 4}, "staleness", "yellow", "less than the 4 versions"),
    (STALE | TAIL | _algorithm(epochs=4) | {"steps": 4}, "staleness", "red", "less than the 4 versions"),
    (_algorithm(epochs=2) | {"steps": 2}, "correction", "yellow", "2 steps on each batch: the clips take"),
    (_algorithm(epochs=2, **TRAINER) | {"steps": 2}, "correction", "green", "ratios to the trainer's"),
    (_algorithm(**TRAINER) | STALE, "correction", "yellow", "nothing weighs samples of older versions"),
    (_algorithm(**TRAINER, correction="tis") | STALE, "correction", "green", "tis, 0 to 2"),
    (_algorithm(surrogate="reinforce") | STALE, "correction", "yellow", "as if this one had sampled them"),
    (_algorithm(surrogate="reinforce") | TAIL, "correction", "yellow", "as if this one had sampled them"),
    (_algorithm(surrogate="reinforce") | TAIL | FRESH, "correction", "green", "reinforce, without ratios"),
    (_algorithm(surrogate="reinforce", correction="tis", **TRAINER) | STALE, "correction", "green", "tis"),
    (
        _algorithm(surrogate="reinforce", epochs=2) | {"steps": 2},
        "correction",
        "yellow",
        "of which only the first is of the policy that sampled it",
    ),
    (
        _algorithm(correction="tis", correction_high=0.9, **TRAINER),
        "correction",
        "yellow",
        "is outside the bounds",
    ),
    (
        _algorithm(correction="icepop", correction_high=0.9, **TRAINER),
        "correction",
        "red",
        "keeps about 0% of tokens if engine and trainer agree: no step has measured that yet",
    ),
    (_algorithm(groups=7), "data", "red", "36 samples, 6 whole groups where a rollout batch takes 7"),
    (_algorithm(groups=7) | TAIL, "data", "yellow", "6 whole groups where a rollout batch takes 7"),
    ({"recipe": {"min_reward": 99.0}}, "data", "red", "dropped: min_reward 36"),
    (
        {"recipe": {"reward_source": "judge"}},
        "rewards",
        "red",
        "none from source 'judge' (there are: agent 25)",
    ),
    ({"recipe": {"reward_source": "judge"}} | TAIL, "rewards", "red", "none from source 'judge'"),
    ({"evaluation": {"every": 7}}, "evaluation", "green", "one trajectory of split eval, every 7 steps"),
    ({"evaluation": {"source_runs": ["none"]}}, "evaluation", "yellow", "no trajectory of split eval"),
    (
        {"evaluation": {"source_runs": ["none"]}, "algorithm": {"name": "sft", "batch_size": 2}},
        "evaluation",
        "red",
        "in run none to evaluate on",
    ),
]


@pytest.fixture(scope="module")
def readers() -> Iterator[tuple[Callable[..., Any], Callable[..., References]]]:
    """Connects to a store, and finds the samples that a recipe may choose from, once for each cut of it."""
    connections: dict[tuple[Path, str], Connection] = {}
    found: dict[tuple[Path, str, str, Any], References] = {}
    with ExitStack() as stack:

        def connect(log: Store, cut: str) -> Any:
            if (log.path, cut) not in connections:
                connections[log.path, cut] = stack.enter_context(connect_at(log, cut))
            return nullcontext(connections[log.path, cut])

        def find(
            log: Store, cut: Any, run: str, recipe: RecipeConfig, mixture: Any, policy: str
        ) -> References:
            assert (run, policy) == (fabric.RUN, "actor")
            key = log.path, format_cut(cut), recipe.model_dump_json(), mixture
            if key not in found:
                found[key] = find_references(log, cut, run, recipe, mixture=mixture, policy=policy)
            return found[key]

        yield connect, find


@pytest.fixture
def read_once(
    readers: tuple[Callable[..., Any], Callable[..., References]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configurations that ask one store the same share one reading of it."""
    monkeypatch.setattr("rollbook.train.doctor.preflight.connect_at", readers[0])
    monkeypatch.setattr("rollbook.train.batches.units.find_references", readers[1])


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize(("changes", "check", "verdict", "words"), CASES)
def test_what_is_wrong_is_seen(
    log: Store, changes: dict[str, Any], check: str, verdict: str, words: str
) -> None:
    """By its own check, which says why, and what acts on it."""
    result = _checks(log, **changes)[check]
    assert (result.verdict, words in result.said) == (verdict, True), result
    assert verdict == "green" or result.lever


def _rewarded(path: Path, groups: Sequence[Sequence[float]]) -> Store:
    """A store of groups with these rewards."""
    log = rb.open(path, create=True)
    records = [
        record
        for g, rewards in enumerate(groups)
        for i, reward in enumerate(rewards)
        for record in fabric.records(f"g{g}.{i}", group=f"g{g}", reward=reward)
    ]
    fabric.append(log, records)
    return log


MIXED = [[0.0, 1.0, 0.0, 1.0]]
REWARDED = [
    ([[1.0] * 4] * 8, "rewards", "red", "all are equal, so no rollout is better than another"),
    ([*[[0.0] * 4] * 9, [0.0, 0.0, 0.0, 1.0]], "rewards", "yellow", "nearly all are equal"),
    ([*[[1.0] * 4] * 5, *MIXED * 3], "difficulty", "yellow", "5 of 8 groups have one reward throughout"),
    ([[1.0] * 4, [0.0] * 4], "difficulty", "red", "no step would have a gradient"),
    ([[1.0] * 4, *MIXED], "difficulty", "green", "1 of 2 groups have one reward throughout"),
]


@pytest.mark.more_but("given0-*", "given2-*", "given4-*")
@pytest.mark.parametrize(("given", "check", "verdict", "words"), REWARDED)
def test_recorded_rewards(tmp_path: Path, given: Any, check: str, verdict: str, words: str) -> None:
    """That are the same for all, for most, or for all of a group."""
    result = _checks(_rewarded(tmp_path / "store", given))[check]
    assert (result.verdict, words in result.said) == (verdict, True), result


def test_rewards_that_are_no_number(log: Store) -> None:
    """A store takes none today: those of one that has some are counted, and left out of the mean."""
    config = fabric.config(fabric.GRPO)
    recorded = read_recorded(log, log.head(), config)
    for values, verdict, words in (
        ([0.0, nan, 1.0, inf], "yellow", "mean 0.5, deviation 0.5, most often 0 (50%); 2 of them not finite"),
        ([nan, inf, -inf, nan], "red", "4 rewards; 4 of them not finite"),
    ):
        stats = statistics_of(values, ["g"] * 4)
        check = rewards(config, replace(recorded, rewards=stats), "cut")[0]
        assert (check.verdict, words in check.said) == (verdict, True), check


@pytest.mark.usefixtures("read_once")
def test_rewards_of_another_size(tmp_path: Path) -> None:
    """Hundreds are too much for a critic, and where nothing divides them; whitened, or normalized, not."""
    log = _rewarded(tmp_path / "store", [[0.0, 300.0, 100.0, 900.0]] * 4)
    ppo = {"name": "ppo", "groups": 8}
    for algorithm, verdict in (
        ({"name": "grpo"}, "green"),
        ({"name": "rloo"}, "yellow"),
        ({"name": "rloo", "whitening": "unbiased"}, "green"),
        ({"name": "rloo", "reward_normalization": "running"}, "green"),
        ({"name": "rloo", "reward_clip": [0, 400]}, "yellow"),
        (ppo, "yellow"),
        (ppo | {"reward_normalization": "running"}, "green"),
    ):
        check = _checks(log, algorithm=algorithm)["normalization"]
        assert (check.verdict, "far from 1" in check.said) == (verdict, verdict == "yellow"), algorithm


def test_nothing_is_there_yet(tmp_path: Path) -> None:
    """A store in which nothing is recorded is no fault where the samples are to come; at a cut it is."""
    log = rb.open(tmp_path / "empty", create=True)
    verdicts = {name: check.verdict for name, check in _checks(log, "tail").items()}
    assert (verdicts["data"], verdicts["rewards"], verdicts["batch"]) == ("yellow", "yellow", "green")
    assert "red" not in verdicts.values()
    verdicts = {name: check.verdict for name, check in _checks(log).items()}
    assert (verdicts["data"], verdicts["rewards"]) == ("red", "red")


def test_a_split_that_the_recipe_does_not_take_is_named(tmp_path: Path) -> None:
    """Imports are of split `teacher`, recipes take `train` unless they say otherwise: the remedy is said."""
    log = rb.open(tmp_path / "imported", create=True)
    fabric.append(log, fabric.teacher_records(12))
    check = _checks(log, **{"algorithm": {"name": "sft"}, "recipe": {}})["data"]
    assert (check.verdict, check.lever) == ("red", "recipe.splits")
    remedy = 'to train on them: recipe.splits = ["teacher"]'
    assert check.said.endswith(f"; 12 trajectories are of split 'teacher'; {remedy}")
    config = fabric.config(fabric.SFT, recipe={})
    before = log.head()
    with pytest.raises(TrainError) as refused:
        fabric.train(log, config)
    assert f"  12 are of split 'teacher' (recipe.splits: train; {remedy})" in str(refused.value)
    assert log.head() == before


@pytest.mark.usefixtures("read_once")
def test_the_reference_is_looked_for(trained: Callable[..., Store]) -> None:
    """Among the policy's checkpoints; one whose folder is gone is none."""
    log = trained()

    def kl(version: int) -> Check:
        return _checks(log, **_algorithm(kl=0.1, reference_version=version))["kl"]

    assert (kl(0).verdict, kl(11).verdict) == ("green", "green")
    lacking = kl(7)
    assert (lacking.verdict, kl(99).verdict) == ("red", "red")
    assert "of policy 'actor' there are: 0, 4, 8, 9, 11, 12" in lacking.said
    shutil.rmtree(log.path / "checkpoints/demo/actor/v00000011")
    gone = kl(11)
    assert (gone.verdict, "whose checkpoint is gone" in gone.said) == ("red", True)
    assert "there are: 0, 4, 8, 9, 12)" in gone.said


@pytest.mark.usefixtures("read_once")
def test_bounds_at_the_recorded_gap(tmp_path: Path) -> None:
    """The newest step that measured the gap decides; what is kept is that of normal log-ratios."""
    log = rb.open(tmp_path / "gap", create=True)
    for step, gap in enumerate((5.0, 0.1, None)):
        done = replace(fabric.committed(step, step + 1), metrics={"engine_logprob_gap_mean": gap})
        fabric.append(log, [fabric.planned(step, step), done], lane="train")
    for low, high, verdict, share in (
        (0.5, 2.0, "green", "keeps about 100% of tokens at the gap of 0.1 last recorded"),
        (0.95, 1.05, "yellow", "keeps about 31% of tokens"),
        (0.99, 1.01, "red", "keeps about 6% of tokens"),
    ):
        keys = {"correction": "icepop", "correction_low": low, "correction_high": high}
        check = _checks(log, **_algorithm(**keys, **TRAINER))["correction"]
        assert (check.verdict, share in check.said) == (verdict, True), check
    shares = {
        name: kept_share(
            fabric.config(
                fabric.GRPO,
                **_algorithm(correction=name, correction_low=0.5, correction_high=2.0, **TRAINER),
            ).algorithm,
            *(0.2, 100.0),
        )
        for name in ("icepop", "mis", "sequence_mask_tis")
    }
    # Deviations 0.25, 2.5 and 0.025; ln 2 is 2.77, 0.277 and 27.7 of them.
    assert shares == pytest.approx({"icepop": 0.9943, "mis": 0.2179, "sequence_mask_tis": 1.0}, abs=2e-4)


def test_a_target_without_a_term(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Is refused before any check."""
    path = tmp_path / "c.toml"
    path.write_text(fabric.toml(fabric.config(fabric.GRPO)))
    code, _, err = cli("preflight", path, "--set", "algorithm.kl_target=0.1")
    assert (code, "kl_target is what kl or reward_kl adapts to: set one of them above 0" in err) == (2, True)


def test_memory_counts_every_model() -> None:
    """A parameter in training takes 16 bytes, in bfloat16 18; a critic as many again."""
    count = parameters(read_shape(fabric.model_folder()))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(fabric.model_folder())
    assert count == sum(parameter.numel() for parameter in model.parameters())
    for name, dtype, each in (("grpo", "float32", 16), ("ppo", "float32", 32), ("ppo", "bfloat16", 36)):
        memory = _checks(None, algorithm={"name": name}, dtype=dtype)["memory"]
        assert memory.said.startswith(f"{count * each / 2**30:.2f} GiB of state, ")


def test_factors_that_no_weights_can_have() -> None:
    """Of an output that is the embedding: the check of the model is red, and names the key."""
    lora = {"targets": ["q_proj", "lm_head"]}
    check = _checks(None, lora=lora)["model"]
    assert (check.verdict, check.lever) == ("red", "lora.targets")
    assert "output is its embedding (tie_word_embeddings)" in check.said
    untied = _checks(None, lora=lora, model=str(fabric.untied_folder()))
    assert (untied["model"].verdict, untied["memory"].verdict) == ("green", "green")


@pytest.mark.usefixtures("read_once")
def test_memory_of_a_forward_pass(log: Store) -> None:
    """Padded, samples times the longest; packed, the tokens that are named, or the longest sample."""
    results = {}
    for name, changes in {
        "padded": {"micro_batch_size": 5},
        "packed": {"micro_batch_size": None, "tokens_per_micro_batch": 1000},
        "less than one": {"micro_batch_size": None, "tokens_per_micro_batch": 1},
    }.items():
        memory = _checks(log, **changes)["memory"]
        results[name] = (memory.said.partition("(")[2].partition(" in a")[0], memory.lever)
    longest = int(results["padded"][0].split()[3])
    assert 5 < longest < 30
    assert results == {
        "padded": (f"5 samples of {longest} tokens", "micro_batch_size"),
        "packed": ("at most 1000 tokens, all trained,", "tokens_per_micro_batch"),
        "less than one": (f"at most {longest} tokens, all trained,", "tokens_per_micro_batch"),
    }


def test_the_command(log: Store, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Exit code 0 where nothing is red, else 1; a line for each check; without a store, what needs none."""
    path = tmp_path / "c.toml"
    path.write_text(fabric.toml(fabric.config(fabric.GRPO)))
    code, out, _ = cli("preflight", path, "--store", log.path)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == ["check", *SOUND]
    assert "levers" not in out
    code, out, _ = cli("preflight", path, "--store", log.path, "--set", "recipe.reward_source=judge")
    assert (code, "levers: recipe.reward_source" in out) == (1, True)
    code, out, _ = cli(
        "preflight", path, "--store", log.path, "--set", "recipe.reward_source=judge", "--json"
    )
    assert code == 1
    assert [c["name"] for c in orjson.loads(out) if c["verdict"] == "red"] == ["data", "rewards"]
    code, out, _ = cli("preflight", path, "--json")
    assert code == 0
    assert [c["name"] for c in orjson.loads(out)] == SOUND[:8]


def test_what_the_model_cannot_be_given_is_counted(recorded: Callable[..., Store]) -> None:
    """Ids beyond its vocabulary and paths beyond its context, each by its rule."""
    log = recorded()
    long, odd = fabric.T([1] * 70, [20]), fabric.T([1], [fabric.VOCAB])
    for name, turn in (("long", long), ("odd", odd)):
        fabric.append(log, fabric.records(name, [turn], group=name, reward=1.0), lane=name)
    data = _checks(log)["data"]
    assert {"too_long 1", "outside_vocabulary 1"} <= set(data.said.partition("dropped: ")[2].split(", "))


def _routed(log: Store, positions: Sequence[int]) -> Store:
    """Turns of 4 tokens each, of which so many have experts."""
    for at, count in enumerate(positions):
        experts = pack(np.zeros((count, mixtures.LAYERS, mixtures.TOPK), np.int32), 0) if count else {}
        turns = [fabric.T((1, 2), (3, 4), experts=experts)]
        fabric.append(log, fabric.records(f"t{at}", turns, group="g", reward=float(at)))
    return log


@pytest.mark.usefixtures("read_once")
@pytest.mark.more_but("positions1-*", "positions3-*")
@pytest.mark.parametrize(
    ("positions", "verdict", "summary"),
    [
        ((3, 3, 3, 3), "green", "75% of the recorded tokens have experts"),
        (
            (3, 0, 3, 0),
            "yellow",
            "38% of the recorded tokens have experts: for the others routers choose",
        ),
        ((0, 0), "red", "0% of the recorded tokens have experts: nothing is replayed"),
        ((), "red", "no token is recorded"),
    ],
)
def test_experts_to_replay(store: Store, positions: Any, verdict: str, summary: str) -> None:
    """How much of what is recorded has some; nothing is said where nobody asks."""
    log, model = _routed(store, positions), str(mixtures.mixture("qwen3_moe")[0])
    check = _checks(log, model=model, routing_replay=True)["routing"]
    assert (check.verdict, check.said) == (verdict, summary)
    assert "routing" not in _checks(log, model=model)
    dense = _checks(log, routing_replay=True)["routing"]
    assert (dense.verdict, dense.said) == ("red", "the model has no experts")
    if not positions:
        assert _checks(log, "tail", model=model, routing_replay=True)["routing"].verdict == "yellow"
