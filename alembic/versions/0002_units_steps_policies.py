"""Units, policy versions, consumers, steps; states of segments; text without a length."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_LENGTHS = {"path": 512, "run": 128, "policy": 128, "weights_digest": 64}


def upgrade() -> None:
    """Add the new tables and columns; every row stays, and each known segment was a closed one."""
    _create_tables()
    with op.batch_alter_table("lanes") as lanes:
        for name, kind in (
            ("opened_us", sa.BigInteger()),
            ("process", sa.Integer()),
            ("truncated_bytes", sa.BigInteger()),
        ):
            lanes.alter_column(name, existing_type=kind, nullable=True)
    with op.batch_alter_table("segments") as segments:
        segments.add_column(sa.Column("state", sa.String(7), nullable=False, server_default="closed"))
        segments.add_column(sa.Column("unit", sa.Text))
        segments.alter_column("events", existing_type=sa.BigInteger(), nullable=True)
        segments.alter_column("bytes", existing_type=sa.BigInteger(), nullable=True)
    with op.batch_alter_table("segments") as segments:
        segments.alter_column("state", existing_type=sa.String(7), server_default=None)
    with op.batch_alter_table("checkpoints") as checkpoints:
        for name, length in _LENGTHS.items():
            checkpoints.alter_column(
                name, existing_type=sa.String(length), type_=sa.Text(), existing_nullable=False
            )


def _create_tables() -> None:
    big, text, lane = sa.BigInteger, sa.Text, sa.String(63)
    op.create_table(
        "store_meta",
        sa.Column("store_id", sa.String(36), primary_key=True),
        sa.Column("format", sa.Integer, nullable=False),
    )
    op.create_table(
        "units",
        sa.Column("lane", lane, sa.ForeignKey("lanes.name"), primary_key=True),
        sa.Column("name", text, primary_key=True),
        *(
            sa.Column(name, sa.Integer, nullable=False)
            for name in ("first_segment", "last_segment", "generation")
        ),
        *(sa.Column(name, big, nullable=False) for name in ("first_seq", "next_seq", "bytes")),
        sa.Column("remote", text),
        sa.Column("sealed_us", big, nullable=False),
        sa.Column("dropped_us", big),
        sa.Column("chain", sa.String(32), nullable=False),
    )
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


def downgrade() -> None:
    """Go back. What revision 0001 cannot say goes: open segments, and that a lane's opening is unknown."""
    for name in ("steps", "consumers", "policy_versions", "units", "store_meta"):
        op.drop_table(name)
    op.execute("delete from segments where events is null or bytes is null")
    for name in ("opened_us", "process", "truncated_bytes"):
        op.execute(f"update lanes set {name} = 0 where {name} is null")
    with op.batch_alter_table("checkpoints") as checkpoints:
        for name, length in _LENGTHS.items():
            checkpoints.alter_column(
                name, existing_type=sa.Text(), type_=sa.String(length), existing_nullable=False
            )
    with op.batch_alter_table("segments") as segments:
        segments.drop_column("unit")
        segments.drop_column("state")
        segments.alter_column("events", existing_type=sa.BigInteger(), nullable=False)
        segments.alter_column("bytes", existing_type=sa.BigInteger(), nullable=False)
    with op.batch_alter_table("lanes") as lanes:
        for name, kind in (
            ("opened_us", sa.BigInteger()),
            ("process", sa.Integer()),
            ("truncated_bytes", sa.BigInteger()),
        ):
            lanes.alter_column(name, existing_type=kind, nullable=False)
