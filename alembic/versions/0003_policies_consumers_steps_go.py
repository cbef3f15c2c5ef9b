"""Policy versions, consumers and steps are read from the log alone: their tables go."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop the tables; SQL's views of the same names are made from the log."""
    for name in ("steps", "consumers", "policy_versions"):
        op.drop_table(name)


def downgrade() -> None:
    """Make them again, empty: `rollbook store rebuild-catalog` of the older release fills them."""
    big, text, lane = sa.BigInteger, sa.Text, sa.String(63)
    op.create_table(
        "policy_versions",
        sa.Column("run", text, primary_key=True),
        sa.Column("policy", text, primary_key=True),
        sa.Column("policy_version", big, primary_key=True, autoincrement=False),
        sa.Column("weights_digest", text, nullable=False),
        sa.Column("path", text, nullable=False),
        sa.Column("published_us", big),
        sa.Column("activated_us", big),
    )
    op.create_table(
        "consumers",
        sa.Column("name", text, primary_key=True),
        sa.Column("cut", text, nullable=False),
        sa.Column("moved_us", big, nullable=False),
        sa.Column("lane", lane, nullable=False),
        sa.Column("seq", big, nullable=False),
    )
    op.create_table(
        "steps",
        sa.Column("run", text, primary_key=True),
        sa.Column("policy", text, primary_key=True),
        sa.Column("step", big, primary_key=True, autoincrement=False),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("status", sa.String(9), nullable=False),
        sa.Column("input_version", big),
        sa.Column("output_version", big),
        sa.Column("cut", text),
        sa.Column("lane", lane),
        sa.Column("seq", big),
    )
