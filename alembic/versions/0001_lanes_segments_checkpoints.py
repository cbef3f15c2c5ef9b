"""Lanes, segments and checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the first tables."""
    op.create_table(
        "lanes",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("opened_us", sa.BigInteger, nullable=False),
        sa.Column("process", sa.Integer, nullable=False),
        sa.Column("truncated_bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "segments",
        sa.Column("lane", sa.String(63), sa.ForeignKey("lanes.name"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("first_seq", sa.BigInteger, nullable=False),
        sa.Column("events", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "checkpoints",
        sa.Column("path", sa.String(512), primary_key=True),
        sa.Column("run", sa.String(128), nullable=False),
        sa.Column("policy", sa.String(128), nullable=False),
        sa.Column("policy_version", sa.BigInteger, nullable=False),
        sa.Column("weights_digest", sa.String(64), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("checkpoints")
    op.drop_table("segments")
    op.drop_table("lanes")
