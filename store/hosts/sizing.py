"""What a medium is asked for by so many hosts, and what that costs. Pure.

Prices are list prices of S3 in its cheapest regions, in US dollars; what one follower takes was measured by
`python -m bench cluster`. All of it is in `Prices`, to be replaced by your own.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.store.hosts.units import UNITS_S

MONTH_S = 30 * 86_400
GB = 1e9


@dataclass(frozen=True, slots=True)
class Load:
    """What hosts write.

    Attributes:
        hosts: that write, each in one lane.
        events_s: of a host, a second.
        event_kb: of an event, in thousands of bytes.
        followers: hosts that copy all lanes.
        pace_s: between two chunks of a lane.
        lease_s: of a process; it is renewed three times in it.
        keep_s: how long chunks stay.
        packed: bytes of chunks, of the events' own.
    """

    hosts: int
    events_s: float = 200.0
    event_kb: float = 14.0
    followers: int = 2
    pace_s: float = 0.25
    lease_s: float = 6.0
    keep_s: float = 604_800.0
    packed: float = 0.54

    @property
    def bytes_s(self) -> float:
        """Of all hosts together."""
        return self.hosts * self.events_s * self.event_kb * 1e3


@dataclass(frozen=True, slots=True)
class Prices:
    """What a service asks for, and what it bears.

    Attributes:
        put, get, gb_month: of a thousand writes, a thousand reads, and a month of a gigabyte.
        puts_prefix_s: writes a second below one prefix.
        follower_mb_s: what one follower takes.
    """

    put: float = 0.005
    get: float = 0.0004
    gb_month: float = 0.023
    puts_prefix_s: float = 3_500.0
    follower_mb_s: float = 50.0


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a load asks for.

    Attributes:
        puts_s: writes a second; of one lane `puts_lane_s`.
        gets_s: reads a second, of all followers.
        mb_s: what the hosts write, in events; in the medium `packed_mb_s`.
        chunks_gb: that are kept at a time.
        put_month, get_month, chunks_month: dollars a month.
        hosts_a_follower: how many hosts one follower keeps up with.
        nats_mb_s: what a NATS cluster's disks take with three copies.
    """

    hosts: int
    puts_s: float
    puts_lane_s: float
    gets_s: float
    mb_s: float
    packed_mb_s: float
    chunks_gb: float
    put_month: float
    get_month: float
    chunks_month: float
    hosts_a_follower: int
    nats_mb_s: float

    @property
    def month(self) -> float:
        """Dollars a month in all, without the sealed files."""
        return self.put_month + self.get_month + self.chunks_month


def sizing(load: Load, prices: Prices) -> Sizing:
    """What a load asks for, at these prices."""
    of_lane = 1 / load.pace_s
    renewals = 3 / load.lease_s if load.lease_s else 0.0
    puts = load.hosts * (of_lane + renewals)
    # One in three looks at a lane finds nothing yet; and what a host tells of its units is looked at.
    gets = load.followers * load.hosts * (of_lane * 1.5 + 1 / UNITS_S)
    packed = load.bytes_s * load.packed
    kept = packed * load.keep_s / GB
    of_host = load.events_s * load.event_kb / 1e3
    return Sizing(
        load.hosts,
        puts,
        of_lane,
        gets,
        load.bytes_s / 1e6,
        packed / 1e6,
        kept,
        puts * MONTH_S / 1e3 * prices.put,
        gets * MONTH_S / 1e3 * prices.get,
        kept * prices.gb_month,
        int(prices.follower_mb_s / of_host),
        3 * packed / 1e6,
    )
