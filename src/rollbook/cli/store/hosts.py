"""`rollbook store join`, `follow` and `hosts`: a store of several hosts."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from pathlib import Path

from rollbook.cli.store.seal import stopped_by_signals
from rollbook.cli.terminal import Console, print_json, print_table, say
from rollbook.store.errors import ConfigError, StoreError
from rollbook.store.hosts.carrier import Carrier
from rollbook.store.hosts.create import create
from rollbook.store.hosts.join import join
from rollbook.store.hosts.leave import leave
from rollbook.store.hosts.sizing import Load, Prices, sizing
from rollbook.store.hosts.status import statuses
from rollbook.store.open import open_store
from rollbook.store.settings import MediumSettings, RemoteSettings

LOOK_S = 2.0


def run_join(
    store: Path,
    url: str,
    settings: MediumSettings,
    remote: RemoteSettings | None,
    as_json: bool,
    *,
    make: bool,
) -> None:
    """Make a folder one of the store's hosts, and print what it has now.

    Args:
        make: the store too, where there is none.
    """
    made = make and create(url, settings)
    report = join(store, url, settings, remote)
    if as_json:
        print_json(asdict(report) | {"created": made})
        return
    if made:
        say(f"{url} is a new store")
    say(f"{store} is host {report.host} of {url}")
    for lane, events in sorted(report.lanes.items()):
        say(f"lane {lane}: {events} events")


def run_follow(path: Path, once: bool) -> None:
    """Follow the other hosts, and ship what this one's processes left, until it is interrupted."""
    carrier = _carrier(path)
    stop, console = threading.Event(), Console(stderr=True)
    console.print(f"host {carrier.host} follows {carrier.medium.address}")
    trouble = ""
    with stopped_by_signals(stop):
        while not stop.is_set():
            try:
                carrier.catch_up()
                trouble = ""
            except StoreError as error:
                if str(error) != trouble:
                    console.tell((str(error), "yellow"))
                trouble = str(error)
            if once:
                return
            stop.wait(LOOK_S)


def run_hosts(path: Path, as_json: bool) -> None:
    """Print each lane of each host: how far it is here, and whether its process runs."""
    carrier = _carrier(path)
    rows = statuses(path.absolute(), carrier)
    if as_json:
        print_json({"host": carrier.host, "medium": carrier.medium.address, "lanes": rows})
        return
    say(f"this is host {carrier.host} of {carrier.medium.address}")
    if rows:
        print_table(list(rows[0]), [tuple(row.values()) for row in rows])


def run_leave(path: Path, as_json: bool) -> None:
    """Make a folder a store of this host alone, and print what it holds."""
    log, carrier = open_store(path), _carrier(path)
    report = leave(log, carrier)
    if as_json:
        print_json(report)
        return
    for lane, events in sorted(report.lanes.items()):
        say(f"lane {lane}: {events} events")
    say(f"{path} is a store of this host alone; {len(report.checkpoints)} checkpoints were fetched")


def run_sizing(hosts: str, load: Load, as_json: bool) -> None:
    """Print what so many hosts ask of object storage.

    Raises:
        ConfigError: these are no numbers of hosts.
    """
    try:
        counts = [int(count) for count in hosts.split(",")]
    except ValueError:
        raise ConfigError(f"--hosts {hosts!r}: write numbers with commas, such as 10,100") from None
    sizes = [sizing(replace(load, hosts=count), Prices()) for count in counts]
    if as_json:
        print_json([asdict(size) | {"month": size.month} for size in sizes])
        return
    rows = [
        (
            size.hosts,
            f"{size.puts_s:,.0f}",
            f"{size.gets_s:,.0f}",
            f"{size.mb_s:,.0f}",
            f"{size.packed_mb_s:,.1f}",
            f"{size.chunks_gb:,.0f}",
            f"{size.put_month:,.0f} + {size.get_month:,.0f} + {size.chunks_month:,.0f}",
            f"{size.month:,.0f}",
        )
        for size in sizes
    ]
    head = ["hosts", "PUT/s", "GET/s", "MB/s", "packed", "chunks GB", "PUT + GET + kept, $", "$ a month"]
    print_table(head, rows)
    say(
        f"one follower keeps up with {sizes[0].hosts_a_follower} such hosts; a lane has a prefix of its own, "
        f"which bears {Prices().puts_prefix_s:,.0f} PUT/s, and puts {sizes[0].puts_lane_s:g}; "
        f"NATS would write {sizes[-1].nats_mb_s:,.0f} MB/s for {sizes[-1].hosts:,} hosts, with three copies"
    )


def _carrier(path: Path) -> Carrier:
    carrier = open_store(path).carrier
    if not isinstance(carrier, Carrier):
        raise ConfigError(
            f"{path} is a store of this host alone: name what carries it in store.toml, [medium] url"
        )
    return carrier
