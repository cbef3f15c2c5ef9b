"""Queries that a diagnosis is read with, and that it shows as its evidence: whoever runs one sees the same
numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Training:
    """The newest training of a policy in a run: it began with this step, from this version."""

    run: str
    policy: str
    step: int = 0
    version: int = 0

    @property
    def of(self) -> str:
        """Condition: about the policy."""
        return f"run = {literal(self.run)} AND policy = {literal(self.policy)}"

    @property
    def _committed(self) -> str:
        return f"{self.of} AND status = 'committed' AND step >= {self.step}"

    def metrics(self, *names: str) -> str:
        """Metrics of its committed steps."""
        return f"SELECT step, {', '.join(names)} FROM metrics WHERE {self._committed} ORDER BY step"

    def held_out(self) -> str:
        """Of each version the rewards of its held-out trajectories, if its evaluation is whole; the deviation
        is that of all of them."""
        return (
            "SELECT max_version AS version, avg(reward) AS reward, count(*) AS trajectories, "
            "any_value(deviation) AS deviation "
            "FROM (SELECT *, coalesce(stddev_samp(reward) OVER (), 0) AS deviation FROM trajectories "
            f"WHERE run = {literal(self.run)} AND split = 'eval' AND reward IS NOT NULL "
            f"AND max_version >= {self.version} AND max_version NOT IN "
            f"(SELECT policy_version FROM ({self.partial_evaluations()}))) "
            "GROUP BY max_version ORDER BY version"
        )

    def losses(self) -> str:
        """Of each version the loss of held-out samples."""
        return (
            "SELECT policy_version, arg_max(loss, time) AS loss FROM evaluations "
            f"WHERE {self.of} AND loss IS NOT NULL AND policy_version >= {self.version} "
            "GROUP BY policy_version ORDER BY policy_version"
        )

    def partial_evaluations(self) -> str:
        """The evaluations that are not whole, unless a later one of their version is."""
        return (
            "SELECT policy_version, arg_max(trajectories, time) AS trajectories, "
            f"arg_max(expected, time) AS expected FROM evaluations WHERE {self.of} "
            f"AND policy_version >= {self.version} "
            "GROUP BY policy_version HAVING arg_max(coalesce(whole, true), time) = false"
        )

    def drops(self) -> str:
        """Of each rule how many samples it dropped."""
        return (
            f"SELECT rule, count(*) AS samples FROM drops WHERE {self._dropped} GROUP BY rule ORDER BY rule"
        )

    def dropped_and_used(self, rule: str) -> str:
        """How many samples a rule dropped, and how many steps used."""
        return (
            f"SELECT {self._count(rule)} AS {rule}, coalesce(sum(samples), 0)::BIGINT AS used "
            f"FROM metrics WHERE {self._committed}"
        )

    def without_gradient(self) -> str:
        """How many steps had no gradient, and how many samples were dropped for equal rewards."""
        return (
            "SELECT count(gradient_norm) AS steps, count(*) FILTER (gradient_norm = 0) AS without_gradient, "
            f"{self._count('zero_variance')} AS zero_variance, coalesce(sum(samples), 0)::BIGINT AS used "
            f"FROM metrics WHERE {self._committed}"
        )

    @property
    def _dropped(self) -> str:
        return f"run = {literal(self.run)} AND step >= {self.step}"

    def _count(self, rule: str) -> str:
        return f"(SELECT count(*) FROM drops WHERE {self._dropped} AND rule = {literal(rule)})"

    def failed_steps(self) -> str:
        """Of each step that had attempts that failed the error of the last one."""
        return (
            f"SELECT step, arg_max(error, attempt) AS error FROM steps WHERE {self.of} "
            f"AND status = 'failed' AND step >= {self.step} GROUP BY step ORDER BY step"
        )

    def failed_syncs(self) -> str:
        """The transfers of weights that failed."""
        return (
            f"SELECT policy_version, engine, coalesce(error, '') AS error FROM syncs WHERE {self.of} "
            f"AND status = 'failed' AND policy_version >= {self.version} ORDER BY started"
        )

    def ended_turns(self) -> str:
        """How many turns completed and failed since it began, by the lane of the proxy and by the error."""
        return (
            "SELECT status, lane, coalesce(error, '') AS error, count(*) AS turns FROM turns "
            f"WHERE run = {literal(self.run)} AND status <> 'running' AND requested >= "
            f"(SELECT min(planned) FROM steps WHERE {self.of} AND step >= {self.step}) "
            "GROUP BY ALL ORDER BY status DESC, turns DESC, lane, error"
        )

    def ended_launches(self) -> str:
        """How many launches ended since it began, by rollouts; and why their infrastructure failed."""
        return (
            "SELECT rollout, status = 'infra_error' AS by_infrastructure, "
            "if(status = 'infra_error', coalesce(why, ''), '') AS why, count(*) AS launches FROM launches "
            f"WHERE run = {literal(self.run)} AND status NOT IN ('running', 'cancelled') AND ended >= "
            f"(SELECT min(planned) FROM steps WHERE {self.of} AND step >= {self.step}) "
            "GROUP BY ALL ORDER BY by_infrastructure DESC, launches DESC, rollout, why"
        )


def literal(text: str) -> str:
    """A text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"
