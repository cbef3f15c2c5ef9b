"""The columns of the SQL views, as data: name, DuckDB type, and meaning with its unit. Pure.

A test compares names, order and types with DuckDB's description of each view.

`View` is a whole view as data; `text` and `json` write a field of `extra` in SQL.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.store.events.schema import COLUMNS

SPANS = 'STRUCT("policy" VARCHAR, "version" BIGINT, "start" INTEGER, "end" INTEGER)[]'


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """A column of a view: its name, DuckDB type and meaning."""

    name: str
    type: str
    doc: str


RUN = ViewColumn("run", "VARCHAR", "the run")
LANE = ViewColumn("lane", "VARCHAR", "the lane of the event this row began with")
TRAJECTORY = ViewColumn("trajectory", "VARCHAR", "the client's name of the trajectory, unique in its run")
TRAJECTORY_ID = ViewColumn("trajectory_id", "VARCHAR", "Rollbook's id of the trajectory, unique everywhere")
TURN_ID = ViewColumn("turn_id", "VARCHAR", "the turn")
POLICY = ViewColumn("policy", "VARCHAR", "named line of weights, by default actor")

_EVENT_TYPES = {
    "seq": "BIGINT",
    "schema_version": "SMALLINT",
    "time": "TIMESTAMP",
    "policy_version": "BIGINT",
    "step": "BIGINT",
    "reward": "DOUBLE",
    "prompt_ids": "INTEGER[]",
    "completion_ids": "INTEGER[]",
    "logprobs": "FLOAT[]",
    "version_spans": SPANS,
}
EVENTS = (
    ViewColumn("lane", "VARCHAR", "the lane; with seq, the event's place in the log"),
    *(ViewColumn(c.name, _EVENT_TYPES.get(c.name, "VARCHAR"), c.doc) for c in COLUMNS),
)

RUNS = (
    RUN,
    ViewColumn("opened", "TIMESTAMP", "when the command began to write, UTC"),
    ViewColumn("lane", "VARCHAR", "the lane it writes"),
    ViewColumn("command", "VARCHAR", "serve, train or import"),
    ViewColumn("model", "VARCHAR", "model directory given to serve; null for train (see config)"),
    ViewColumn("config", "JSON", "the command's whole configuration"),
    ViewColumn("environment", "JSON", "fingerprint of where it trains; empty for serve"),
)

REWARDS = (
    RUN,
    TRAJECTORY_ID,
    TRAJECTORY,
    ViewColumn("turn_id", "VARCHAR", "the turn rewarded; null where it is the whole trajectory"),
    ViewColumn("reward", "DOUBLE", "the number"),
    ViewColumn("source", "VARCHAR", "name of the source; agent by default"),
    ViewColumn("event_id", "VARCHAR", "how a later reward names it to supersede it"),
    ViewColumn("time", "TIMESTAMP", "when it was assigned, UTC"),
    LANE,
    ViewColumn("seq", "BIGINT", "its place in the lane"),
    ViewColumn("superseded", "BOOLEAN", "a later reward took its place"),
    ViewColumn("key", "VARCHAR", "name of the API key that assigned it; null where keys are not checked"),
)

PREFERENCES = (
    RUN,
    ViewColumn("trajectory_id", "VARCHAR", "the trajectory that was chosen"),
    ViewColumn("rejected_trajectory_id", "VARCHAR", "the one that it was preferred to"),
    ViewColumn("trajectory", "VARCHAR", "name of the chosen one; null where it is not in the log"),
    ViewColumn("rejected", "VARCHAR", "name of the other"),
    ViewColumn("margin", "DOUBLE", "by how much it is better; null where that was not said"),
    ViewColumn("source", "VARCHAR", "whose preference it is; label by default"),
    ViewColumn("event_id", "VARCHAR", "of the event"),
    ViewColumn("time", "TIMESTAMP", "when it was added, UTC"),
    LANE,
    ViewColumn("key", "VARCHAR", "name of the API key that added it; null where keys are not checked"),
)

LAUNCHES = (
    RUN,
    TRAJECTORY,
    TRAJECTORY_ID,
    ViewColumn("launch_id", "VARCHAR", "of the launch, unique in the trajectory"),
    ViewColumn("rollout", "VARCHAR", "name of the configuration that says what to start"),
    ViewColumn("group", "VARCHAR", "group of the trajectory"),
    ViewColumn("epoch", "BIGINT", "where in the rollout this is: the pass over its tasks, from 0"),
    ViewColumn("task", "VARCHAR", "the task; null once erased"),
    ViewColumn("sample", "BIGINT", "which of the task's trajectories in the epoch, from 0"),
    ViewColumn("attempt", "BIGINT", "from 1"),
    ViewColumn("places", "BIGINT", "how many places its rollouts have in all; null: not said, or endless"),
    ViewColumn("launcher", "VARCHAR", "how it was started, such as subprocess or python"),
    ViewColumn("isolation", "JSON", "what really keeps it apart from others"),
    ViewColumn("owner", "VARCHAR", "id of the process that started it"),
    ViewColumn(
        "status",
        "VARCHAR",
        "done, truncated, agent_error, infra_error, timeout, cancelled, or running (no end was recorded)",
    ),
    ViewColumn("why", "VARCHAR", "more on how it ended"),
    ViewColumn("proxy_away", "BOOLEAN", "it failed because the proxy was away, and another follows"),
    ViewColumn("exit_code", "BIGINT", "of its first process; null where a signal ended it"),
    ViewColumn("signal", "BIGINT", "number of that signal"),
    ViewColumn("started", "TIMESTAMP", "UTC"),
    ViewColumn("ended", "TIMESTAMP", "UTC"),
    ViewColumn("seconds", "DOUBLE", "how long it ran, in s"),
    ViewColumn("cpu_s", "DOUBLE", "CPU time of its processes, in s; null where it is not known"),
    ViewColumn(
        "peak_rss_mb",
        "DOUBLE",
        "most memory of its largest process, or by a cgroup of all, in MB; null: not known",
    ),
    ViewColumn("output", "JSON", "stream -> path of its file, bytes printed, and bytes of them kept"),
    ViewColumn("scoring", "JSON", "component -> its score, or an object that says why there is none"),
    ViewColumn("leaked", "BIGINT", "processes that it left behind, which were found and ended"),
    LANE,
    ViewColumn("seq", "BIGINT", "place of its launch.started in the lane"),
)

_USAGE = "as the upstream's usage reports, with `--engine upstream`"

TURNS = (
    RUN,
    TRAJECTORY,
    TRAJECTORY_ID,
    TURN_ID,
    ViewColumn("parent_turn_id", "VARCHAR", "the turn whose tokens it extends; null for a root"),
    ViewColumn("root_reason", "VARCHAR", "why it extends none; null where it does"),
    ViewColumn("status", "VARCHAR", "completed, failed, or running (no end was recorded)"),
    ViewColumn(
        "delivered",
        "VARCHAR",
        "sent: the client took the last byte; echoed: it showed the reply later; imported",
    ),
    ViewColumn("policy", "VARCHAR", "that sampled its last token; null for a teacher"),
    ViewColumn("policy_version", "BIGINT", "that sampled its last token; null for a teacher"),
    ViewColumn("version_spans", SPANS, "which version made completion tokens start <= i < end"),
    ViewColumn("prompt_delta", "INTEGER[]", "prompt token ids that the parent turn does not hold"),
    ViewColumn("prompt_length", "BIGINT", "tokens of the whole prompt that the engine got; 0 of text only"),
    ViewColumn("completion_ids", "INTEGER[]", "sampled token ids, the end-of-turn token included"),
    ViewColumn("logprobs", "FLOAT[]", "natural-log probability of each; null for a teacher"),
    ViewColumn("completion_length", "BIGINT", "sampled tokens; 0 of text only"),
    ViewColumn("finish_reason", "VARCHAR", "stop, length or tool_calls, as the client got it"),
    ViewColumn("content", "VARCHAR", "text of the reply; null where it only calls tools"),
    ViewColumn("reply", "JSON", "the assistant message as sent"),
    ViewColumn("new_messages", "JSON", "the request's messages that its base turn's request does not hold"),
    ViewColumn("request", "JSON", "the rest of the request's body"),
    ViewColumn("requested_model", "VARCHAR", "model name the client sent"),
    ViewColumn("sampling", "JSON", "max_new_tokens, temperature and seed in force"),
    ViewColumn("reward", "DOUBLE", "the agent's reward of this turn that is not superseded"),
    ViewColumn("requested", "TIMESTAMP", "when the request was recorded, UTC"),
    ViewColumn("completed", "TIMESTAMP", "when the reply was recorded, UTC"),
    ViewColumn("latency_ms", "DOUBLE", "completed - requested, in ms"),
    LANE,
    ViewColumn("seq", "BIGINT", "place of its turn.requested in the lane"),
    ViewColumn("error", "VARCHAR", "why it failed"),
    ViewColumn("flags", "JSON", "list of oddities, such as malformed_tool_call"),
    ViewColumn(
        "timings",
        "JSON",
        "held_us, engine_us, and first_token_us of it, in µs, where the engine reports them",
    ),
    ViewColumn(
        "min_version", "BIGINT", "oldest version, of whichever policy, that sampled one of its tokens"
    ),
    ViewColumn(
        "max_version", "BIGINT", "newest version, of whichever policy, that sampled one of its tokens"
    ),
    ViewColumn("min_logprob", "FLOAT", "of its least likely sampled token"),
    ViewColumn("sum_logprob", "DOUBLE", "natural-log probability of the whole completion"),
    ViewColumn("endpoint", "VARCHAR", "path of the API that the request came to"),
    ViewColumn("choice", "BIGINT", "place among the completions of one request, from 0"),
    ViewColumn("retry", "BIGINT", "how many earlier tries the client reports"),
    ViewColumn("fidelity", "VARCHAR", "exact, erased, or text_only: it never had ids; null unless completed"),
    ViewColumn("key", "VARCHAR", "name of the API key of the request; null where keys are not checked"),
    ViewColumn("upstream_prompt_tokens", "BIGINT", f"{_USAGE}; cached ones are counted"),
    ViewColumn("upstream_completion_tokens", "BIGINT", f"{_USAGE}, over all choices of the request"),
    ViewColumn("upstream_total_tokens", "BIGINT", f"{_USAGE}; null where it reports none"),
    ViewColumn("repeats", "VARCHAR", "of split replay: the recorded turn that was asked again"),
)

TRAJECTORIES = (
    RUN,
    TRAJECTORY,
    TRAJECTORY_ID,
    ViewColumn("group", "VARCHAR", "trajectories compared with each other; quote it: a word of SQL"),
    ViewColumn("task", "VARCHAR", "the task, as named by the client"),
    ViewColumn(
        "split", "VARCHAR", "train, teacher; eval, judge, quarantine, replay, void, which are never trained"
    ),
    ViewColumn("labels", "JSON", "the client's own, an object"),
    ViewColumn("status", "VARCHAR", "open, completed, truncated, aborted, failed or void"),
    ViewColumn("success", "BOOLEAN", "as the client reported at the finish"),
    ViewColumn("reward", "DOUBLE", "the agent's reward that is not superseded"),
    ViewColumn("turns", "BIGINT", "completed turns"),
    ViewColumn("min_version", "BIGINT", "policy version of its oldest sampled token, of whichever policy"),
    ViewColumn("max_version", "BIGINT", "policy version of its newest sampled token, of whichever policy"),
    ViewColumn("opened", "TIMESTAMP", "UTC"),
    ViewColumn("finished", "TIMESTAMP", "UTC; null while it is open"),
    LANE,
    ViewColumn("fidelity", "VARCHAR", "that of all its completed turns, or mixed; null without any"),
    ViewColumn(
        "origin",
        "JSON",
        "of replay: the trajectory, turn and version it was sampled again with; of judge: the one judged",
    ),
)

TOKENS = (
    RUN,
    TRAJECTORY_ID,
    TURN_ID,
    ViewColumn("position", "BIGINT", "place in the turn's completion, from 0"),
    ViewColumn("token_id", "INTEGER", "the token"),
    ViewColumn("logprob", "FLOAT", "its natural-log probability; null for a teacher"),
    ViewColumn("policy", "VARCHAR", "that sampled it; null for a teacher"),
    ViewColumn("policy_version", "BIGINT", "that sampled it; null for a teacher"),
    ViewColumn("text", "VARCHAR", "text of the token; null where the run's tokenizer is not known here"),
)

POLICIES = (
    RUN,
    POLICY,
    ViewColumn("policy_version", "BIGINT", "optimizer steps taken; 0 is the model the run started from"),
    ViewColumn("parent_version", "BIGINT", "the version it was trained from; null for 0"),
    ViewColumn("weights_digest", "VARCHAR", "sha256 over the tensors' names, types, shapes and hashes"),
    ViewColumn("path", "VARCHAR", "its checkpoint: relative to the store, or, if only served, as served"),
    ViewColumn("published", "TIMESTAMP", "when its weights were written, UTC"),
    ViewColumn("activated", "TIMESTAMP", "when an engine first served it, its weights digest compared, UTC"),
    ViewColumn("removed", "TIMESTAMP", "when its checkpoint was removed, UTC; null where that was not"),
)

STEPS = (
    RUN,
    ViewColumn("step", "BIGINT", "optimizer step, from 0"),
    ViewColumn("attempt", "BIGINT", "1 unless an earlier attempt did not commit"),
    ViewColumn("status", "VARCHAR", "planned, committed, failed, or abandoned after it was committed"),
    POLICY,
    ViewColumn("policy_version", "BIGINT", "version it starts from"),
    ViewColumn("output_version", "BIGINT", "version it made; null unless it committed"),
    ViewColumn("algorithm", "VARCHAR", "its name, such as sft or grpo"),
    ViewColumn("cut", "VARCHAR", "the cut it was planned at, as lane=count,lane=count"),
    ViewColumn("learning_rate", "DOUBLE", "as applied"),
    ViewColumn("samples", "BIGINT", "number of samples it consumes; view samples lists them"),
    ViewColumn("loss", "DOUBLE", "mean over its trained tokens"),
    ViewColumn("metrics", "JSON", "loss, gradient_norm, trained_tokens, reward and others"),
    ViewColumn("digests", "JSON", "stage -> digest of its result"),
    ViewColumn("manifest", "VARCHAR", "JSON: everything that decides the step's bits"),
    ViewColumn("planned", "TIMESTAMP", "UTC"),
    ViewColumn("committed", "TIMESTAMP", "UTC"),
    ViewColumn("phase", "VARCHAR", "digest of the configuration; steps of one phase share an optimizer"),
    ViewColumn("error", "VARCHAR", "why it failed"),
)

EVALUATIONS = (
    RUN,
    POLICY,
    ViewColumn("policy_version", "BIGINT", "the version that was evaluated"),
    ViewColumn("loss", "DOUBLE", "the algorithm's, of the held-out samples; null where it says nothing"),
    ViewColumn(
        "preference_accuracy", "DOUBLE", "share of held-out pairs whose chosen sample is rated higher"
    ),
    ViewColumn("preference_margin", "DOUBLE", "mean rating of their chosen samples less the rejected ones'"),
    ViewColumn("reward", "DOUBLE", "mean reward of the trajectories; null where there are none"),
    ViewColumn("success", "DOUBLE", "share of them that finished with success"),
    ViewColumn("samples", "BIGINT", "held-out samples that were scored"),
    ViewColumn("tokens", "BIGINT", "tokens with loss among them"),
    ViewColumn("trajectories", "BIGINT", "of split eval, finished since the last evaluation, with a reward"),
    ViewColumn("expected", "BIGINT", "how many of them there were to be; null: nobody said"),
    ViewColumn("whole", "BOOLEAN", "false: NOT WHOLE, some of them came to no end; null: it does not say"),
    ViewColumn("oldest_version", "BIGINT", "version of their oldest token"),
    ViewColumn("newest_version", "BIGINT", "version of their newest token"),
    ViewColumn("cut", "VARCHAR", "the cut that the samples are held out at"),
    ViewColumn("metrics", "JSON", "all that was measured"),
    ViewColumn("phase", "VARCHAR", "of the training"),
    ViewColumn("time", "TIMESTAMP", "when it ended, UTC"),
)

SAMPLES = (
    RUN,
    ViewColumn("step", "BIGINT", "the step"),
    ViewColumn("attempt", "BIGINT", "its attempt"),
    ViewColumn("status", "VARCHAR", "the attempt's: planned, committed, failed or abandoned"),
    POLICY,
    ViewColumn("policy_version", "BIGINT", "version the step starts from"),
    ViewColumn("position", "BIGINT", "place in the batch, from 0"),
    TRAJECTORY_ID,
    ViewColumn("turn_id", "VARCHAR", "leaf turn: the sample is the path from its root to it"),
)

DROPS = (
    RUN,
    TRAJECTORY_ID,
    ViewColumn("turn_id", "VARCHAR", "leaf turn of the sample"),
    ViewColumn("rule", "VARCHAR", "the rule that kept it out: [recipes](recipes.md) has all of them"),
    ViewColumn("recipe", "VARCHAR", "digest of the recipe"),
    ViewColumn("step", "BIGINT", "the step it was kept out of"),
    ViewColumn("detail", "JSON", "the numbers that the rule compared"),
    ViewColumn("time", "TIMESTAMP", "UTC"),
    ViewColumn("attempt", "BIGINT", "attempt at the step; only those of committed attempts are final"),
    ViewColumn("policy_version", "BIGINT", "for which that was decided; null: the one the step starts from"),
    ViewColumn("cut", "VARCHAR", "at which that was decided; null: that of the step's plan"),
    POLICY,
)

PATHS = (
    RUN,
    TRAJECTORY_ID,
    ViewColumn("turn_id", "VARCHAR", "leaf turn"),
    ViewColumn("root_turn_id", "VARCHAR", "root turn"),
    ViewColumn("turns", "BIGINT", "turns on the path"),
    ViewColumn("length", "BIGINT", "tokens of the whole sequence: the leaf's prompt and completion"),
    ViewColumn("sampled", "BIGINT", "tokens of it that were sampled, in all its turns"),
    ViewColumn("min_version", "BIGINT", "policy version of its oldest sampled token, of whichever policy"),
    ViewColumn("max_version", "BIGINT", "policy version of its newest sampled token, of whichever policy"),
)

BODIES = (
    ViewColumn("digest", "VARCHAR", "sha256 of the body's JSON"),
    ViewColumn("body", "JSON", "the text, image or schema"),
    ViewColumn("copies", "BIGINT", "segments that hold it"),
    ViewColumn("length", "BIGINT", "characters of its text"),
)

ACTIVATIONS = (
    RUN,
    POLICY,
    ViewColumn("policy_version", "BIGINT", "the version that the engine holds"),
    ViewColumn("engine", "VARCHAR", "its address, or embedded"),
    ViewColumn("weights_digest", "VARCHAR", "of the tensors that it holds, as compared with the trainer's"),
    ViewColumn("path", "VARCHAR", "where it read them; empty if they were sent to it"),
    ViewColumn("weight_name", "VARCHAR", "what it calls them; empty for an engine in the writing process"),
    ViewColumn("event_id", "VARCHAR", "of the event"),
    ViewColumn("time", "TIMESTAMP", "when that was verified, UTC"),
    LANE,
    ViewColumn("seq", "BIGINT", "its place in the lane"),
)

SYNCS = (
    RUN,
    POLICY,
    ViewColumn("policy_version", "BIGINT", "the weights that were sent"),
    ViewColumn("engine", "VARCHAR", "where to"),
    ViewColumn("transport", "VARCHAR", "how"),
    ViewColumn("sync_id", "VARCHAR", "ties its events together"),
    ViewColumn("status", "VARCHAR", "running, finished or failed"),
    ViewColumn("bytes", "BIGINT", "bytes sent"),
    ViewColumn("seconds", "DOUBLE", "from its start to its verification, in s"),
    ViewColumn("started", "TIMESTAMP", "UTC"),
    ViewColumn("ended", "TIMESTAMP", "UTC"),
    ViewColumn("error", "VARCHAR", "why it failed"),
)

LINEAGE = (
    *SAMPLES[:-2],
    TRAJECTORY_ID,
    ViewColumn("leaf_turn_id", "VARCHAR", "leaf turn of the sample"),
    ViewColumn("turn_id", "VARCHAR", "a turn on the path from its root to the leaf"),
)

LEDGER = (
    RUN,
    POLICY,
    ViewColumn("policy_version", "BIGINT", "that sampled the tokens; null where the engine named none"),
    ViewColumn("term", "VARCHAR", "trained, dropped, waiting, in flight or kept out"),
    ViewColumn(
        "rule",
        "VARCHAR",
        "of dropped: the recipe's; of kept out: text only, altered, the split (eval, teacher, judge, "
        "quarantine, replay, void), erased, undelivered, late, omitted or no version",
    ),
    ViewColumn("turns", "BIGINT", "turns with such tokens"),
    ViewColumn("tokens", "BIGINT", "sampled tokens"),
)


@dataclass(frozen=True, slots=True)
class View:
    """A view: its name, one sentence on its rows, its SQL, and what each column means."""

    name: str
    doc: str
    sql: str
    columns: tuple[ViewColumn, ...]


def literal(value: str) -> str:
    """A text as SQL writes it."""
    return "'" + value.replace("'", "''") + "'"


def text(field: str, alias: str = "") -> str:
    """A field of `extra` as text; `alias` is the relation's alias."""
    return f"json_extract_string({alias and alias + '.'}extra, '$.{field}')"


def json(field: str, alias: str = "") -> str:
    """A field of `extra` as JSON; `alias` is the relation's alias."""
    return f"json_extract({alias and alias + '.'}extra, '$.{field}')"
