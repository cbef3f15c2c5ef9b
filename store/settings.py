"""The settings of a store, from `store.toml` in its folder. Every key has a default."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollbook.store.config import describe_invalid, first_invalid_value, invalid_values
from rollbook.store.errors import ConfigError
from rollbook.store.safe_paths import read_small

MIB = 1 << 20


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def table(self) -> dict[str, Any]:
        """Its keys as they are in `store.toml`, but for those that say nothing."""
        return self.model_dump(mode="json", exclude_none=True)


class AppendSettings(_Section):
    """How a lane's writer groups commits and cuts segments."""

    linger_ms: float = Field(default=2.0, ge=0, le=1000)
    """How long a group waits for more events after its first one; longer saves CPU and costs latency."""
    group_events: int = Field(default=512, ge=1)
    """A group of this many events is committed at once."""
    group_bytes: int = Field(default=4 * MIB, ge=1)
    """A group whose events hold about this many bytes is committed at once."""
    segment_bytes: int = Field(default=64 * MIB, ge=1)
    """A segment that has grown beyond this is closed."""
    segment_age_s: float = Field(default=60.0, gt=0)
    """A segment whose first event is older than this is closed."""
    body_bytes: int = Field(default=8192, ge=256)
    """Text and JSON values of a request beyond this are stored once a segment, by content hash."""


class SealSettings(_Section):
    """How closed segments become Parquet."""

    row_group: int = Field(default=128, ge=1)
    """Rows of a row group of fat turns: smaller reads one trajectory faster, larger packs better."""
    compression_level: int = Field(default=1, ge=1, le=22)
    """zstd level."""
    keep_wal_bytes: int = Field(default=1024 * MIB, ge=0)
    """Newest bytes of a lane's segments that stay after they are sealed: tails read them without decoding."""
    compact_bytes: int = Field(default=512 * MIB, ge=0)
    """Neighbouring sealed units are merged until one holds about this many bytes of log; 0 merges nothing.
    Merging takes memory for three times as much."""
    poll_s: float = Field(default=2.0, gt=0)
    """How often the sealer beside `serve` looks for closed segments."""


class RemoteSettings(_Section):
    """Where sealed files are kept, if not beside the log; by default in an S3 medium."""

    uri: str | None = None
    """s3://bucket/prefix; credentials and region come from the environment, as AWS's tools read them."""
    endpoint: str | None = None
    """URL of an S3-compatible service that is not AWS."""


class OwnRemoteSettings(RemoteSettings):
    """Settings given on the operator's command line, which `store.external_access` does not restrict."""


class MediumSettings(_Section):
    """What carries the log between hosts; without `url` there is one host."""

    url: str | None = None
    """s3://bucket/prefix (gs://, az://), or nats://host:port,host:port; file:///folder for hosts of one
    disk."""
    endpoint: str | None = None
    """URL of an S3-compatible service that is not AWS."""
    ack: Literal["local", "medium"] = "local"
    """local: an event is acknowledged when this host's disk has it; medium: when the medium has it too."""
    lease_s: float = Field(default=6.0, ge=0, le=3600)
    """So long after a host was last heard another one may take over what it held; a host that cannot renew
    its lease stops acknowledging before. 0: nobody may, and none stops."""
    keep_s: float = Field(default=604800.0, ge=60)
    """So long chunks stay in the medium once the sealed units that hold the same are in object storage: a
    host that was away for longer reads those."""
    follow: tuple[str, ...] = ("*",)
    """Lanes of other hosts that are copied to this one, by names with `*`; others cannot be read here."""


def medium_settings(**values: Any) -> MediumSettings:
    """Settings from a command line.

    Raises:
        ConfigError: a value cannot be.
    """
    try:
        return MediumSettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(first_invalid_value(error, values)) from error


class OwnMediumSettings(MediumSettings):
    """Settings given on the operator's command line, which `store.external_access` does not restrict."""


class CatalogSettings(_Section):
    """Where the catalog is."""

    url: str | None = None
    """A SQLAlchemy URL, such as postgresql+psycopg://host/db; default: SQLite beside the log."""


class IcebergSettings(_Section):
    """Tables over sealed units, for other engines."""

    publish: bool = False
    """Iceberg tables in the catalog's database follow the sealed units; by hand: `rollbook store publish`."""


class FileSettings(_Section):
    """Who else may use the store's files."""

    share: Literal["nobody", "group", "all"] = "nobody"
    """nobody: new files are 0600 and folders 0700; group: 0660 and 2770, for the folder's group; all: 0664
    and 2775, others read. Files that are there keep their modes."""


class StoreSettings(_Section):
    """All of `store.toml`."""

    append: AppendSettings = AppendSettings()
    seal: SealSettings = SealSettings()
    remote: RemoteSettings = RemoteSettings()
    medium: MediumSettings = MediumSettings()
    catalog: CatalogSettings = CatalogSettings()
    iceberg: IcebergSettings = IcebergSettings()
    files: FileSettings = FileSettings()


def read_settings(store: Path) -> StoreSettings:
    """Settings of the store in this folder. ROLLBOOK_CATALOG_URL in the environment wins over the file.

    Raises:
        ConfigError: the file is no TOML, or has an unknown key or an ill-typed value.
    """
    path = store / "store.toml"
    try:
        values = tomllib.loads(read_small(path).decode()) if path.exists() else {}
        settings = StoreSettings.model_validate(values)
    except ValidationError as error:
        invalid = invalid_values(error, values)
        wrong = "; ".join(
            f"{item.key or 'file'}: {describe_invalid(StoreSettings, item)}" for item in invalid
        )
        raise ConfigError(f"{path}: {wrong}") from error
    except (ValueError, RecursionError) as error:  # a number or a nesting without end, too
        raise ConfigError(f"{path} is not TOML: {error}") from error
    medium = settings.medium
    if settings.remote.uri is None and medium.url is not None and medium.url.startswith("s3://"):
        remote = RemoteSettings(uri=medium.url, endpoint=medium.endpoint)
        settings = settings.model_copy(update={"remote": remote})
    url = os.environ.get("ROLLBOOK_CATALOG_URL")
    return settings.model_copy(update={"catalog": CatalogSettings(url=url)}) if url else settings
