"""Tables by which the processes of a training service agree; what they hold is so for a moment."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make them, empty."""
    big, text, id_ = sa.BigInteger, sa.Text, sa.String(36)
    op.create_table(
        "service_head",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", id_, nullable=False),
        sa.Column("position", big, nullable=False),
    )
    op.create_table(
        "service_batches",
        sa.Column("position", big, primary_key=True, autoincrement=False),
        sa.Column("lane", sa.String(63), nullable=False),
        sa.Column("seq", big, nullable=False),
        sa.Column("events", sa.Integer, nullable=False),
        sa.Column("process", id_, nullable=False),
    )
    op.create_table(
        "service_processes",
        sa.Column("id", id_, primary_key=True),
        sa.Column("until", sa.Double, nullable=False),
        sa.Column("trains", sa.Boolean, nullable=False),
    )
    op.create_table(
        "service_seats",
        sa.Column("name", text, primary_key=True),
        sa.Column("process", id_, nullable=False),
        sa.Column("trains", sa.Boolean, nullable=False),
    )


def downgrade() -> None:
    """Drop them: no process of a service may be running."""
    for name in ("service_seats", "service_processes", "service_batches", "service_head"):
        op.drop_table(name)
