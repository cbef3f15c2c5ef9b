"""What the pinned client does with weights that it saved: `client_weights.py URL WHAT [JSON of options]`
prints a JSON line."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import tinker
from client_loops import made, steps, tokens
from tinker import types


def told(call: Callable[[], object]) -> str:
    """What is told of a request: its result, or why it is refused."""
    try:
        result = call()
        return repr(result.result() if hasattr(result, "result") else result)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def shown(checkpoint: types.Checkpoint) -> dict[str, object]:
    """A checkpoint as JSON."""
    return json.loads(checkpoint.model_dump_json())


def checkpoints(rest: tinker.RestClient, **page: int) -> list[dict[str, object]]:
    """A page of the caller's checkpoints."""
    return [shown(one) for one in rest.list_user_checkpoints(**page).result().checkpoints]


def lists(service: tinker.ServiceClient, rest: tinker.RestClient, base: str) -> object:
    """Two models with weights, and what is told of them and of their session."""
    first = service.create_lora_training_client(base, rank=4, seed=7, user_metadata={"renderer": "plain"})
    first, second = first.result(), made(service, base, rank=8, train_mlp=False, train_unembed=False)
    steps(first, 1)
    first.save_state("one", user_metadata={"step": "1"}).result()
    first.save_weights_for_sampler("two").result()
    path = second.save_state("three").result().path
    service.create_sampling_client(model_path=path).result()
    runs = rest.list_training_runs(limit=1).result()
    session = service.holder._session_id
    own = rest.get_session(session).result()
    page = rest.list_user_checkpoints(limit=2, offset=1).result()
    return {
        "session": session,
        "models": [first.model_id, second.model_id],
        "runs": [run.training_run_id for run in runs.training_runs],
        "cursor": runs.cursor.model_dump(),
        "first": json.loads(rest.get_training_run(first.model_id).result().model_dump_json()),
        "by path": rest.get_training_run_by_tinker_path(path).result().training_run_id,
        "of project": len(rest.list_training_runs(project_id="p1").result().training_runs),
        "of another": len(rest.list_training_runs(project_id="p2").result().training_runs),
        "of first": [shown(one) for one in rest.list_checkpoints(first.model_id).result().checkpoints],
        "page": [one.tinker_path for one in page.checkpoints],
        "page cursor": page.cursor.model_dump(),
        "info": rest.get_weights_info_by_tinker_path(path).result().model_dump(),
        "sessions": rest.list_sessions().result().sessions,
        "own": own.model_dump(),
        "odd": told(lambda: rest.list_training_runs(limit=0)),
    }


def search(rest: tinker.RestClient, asked: types.SessionSearchRequest) -> list[dict[str, object]]:
    """Sessions, one on each page."""
    found, asked = [], asked.model_copy(update={"limit": 1})
    while True:
        page = rest.search_sessions(asked).result()
        found += [json.loads(one.model_dump_json()) for one in page.sessions]
        if page.next_cursor is None:
            return found
        asked = asked.model_copy(update={"cursor": page.next_cursor})


def end(service: tinker.ServiceClient, rest: tinker.RestClient, base: str) -> object:
    """A session that has ended."""
    session = service.holder._session_id
    service.close("errored").result()
    return session


def several(service: tinker.ServiceClient, rest: tinker.RestClient, base: str) -> object:
    """Sessions by pages, and by what was said of them."""
    own, failed = service.holder._session_id, types.ClientFinishedSessionStatusQuery(reasons=["errored"])
    asked = {
        "all": types.SessionSearchRequest(),
        "named": types.SessionSearchRequest(display_name="RUN night"),
        "said": types.SessionSearchRequest(user_metadata={"at": "0"}),
        "of project": types.SessionSearchRequest(project_ids=["p1"]),
        "active": types.SessionSearchRequest(statuses=[types.ActiveSessionStatusQuery()]),
        "failed": types.SessionSearchRequest(statuses=[failed]),
        "of bob": types.SessionSearchRequest(owner=types.UserSearchOwner(owner_urns=["bob"])),
    }
    found = {name: search(rest, one) for name, one in asked.items()}
    pages = [rest.list_sessions(limit=1, offset=at).result().sessions for at in range(4)]
    ids = {name: [session["session_id"] for session in sessions] for name, sessions in found.items()}
    return {"ids": ids, "pages": pages, "last": found["failed"][-1], "own": own}


def keep(service: tinker.ServiceClient, rest: tinker.RestClient, base: str) -> object:
    """How long weights are there, as it was said when they were saved and afterwards."""
    training = made(service, base)
    path = training.save_state("short", ttl_seconds=7200).result().path
    came = {"path": path, "saved": checkpoints(rest)[0]}
    rest.set_checkpoint_ttl_from_tinker_path(path, 86400).result()
    came["longer"] = checkpoints(rest)[0]
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    came["for ever"] = checkpoints(rest)[0]
    training.save_weights_for_sampler("sampler", ttl_seconds=3600).result()
    came["sampler"] = checkpoints(rest)[0]
    came["too short"] = told(lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 60))
    came["too long"] = told(lambda: training.save_state("long", ttl_seconds=10**9))
    came["afterwards"] = len(steps(training, 1))
    return came


def delete(service: tinker.ServiceClient, rest: tinker.RestClient, base: str) -> object:
    """Weights that are deleted while a sampler has them, and a name that is used again."""
    training = made(service, base)
    steps(training, 1)
    state = training.save_state("state").result().path
    path = training.save_weights_for_sampler("best").result().path
    loose = training.save_weights_for_sampler("loose").result().path
    sampler = service.create_sampling_client(model_path=path)
    before = tokens(sampler)
    steps(training, 2)
    training.save_state("later").result()
    for gone in (state, path, loose):
        rest.delete_checkpoint_from_tinker_path(gone).result()
    came = {
        "paths": [state, path, loose],
        "before": before,
        "after": tokens(sampler),
        "left": [one["tinker_path"] for one in checkpoints(rest)],
        "load": told(lambda: service.create_training_client_from_state(state)),
        "open": told(lambda: service.create_sampling_client(model_path=path)),
        "again": told(lambda: rest.delete_checkpoint_from_tinker_path(path)),
        "saved": told(lambda: training.save_state("state")),
        "goes on": steps(training, 1),
    }
    service.close("success").result()
    return came


def publish(service: tinker.ServiceClient, rest: tinker.RestClient, base: str) -> object:
    """Weights that all may use, and what they give."""
    training = made(service, base)
    steps(training, 2)
    path = training.save_state("shared").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    return {"path": path, "model": training.model_id, "tokens": use(service, rest, base, path)["tokens"]}


def use(service: tinker.ServiceClient, rest: tinker.RestClient, base: str, path: str) -> dict[str, object]:
    """Weights that may be another's: what they give, and what of them may be changed."""
    model_id = path.removeprefix("tinker://").partition("/")[0]
    came = {
        "tokens": told(lambda: tokens(service.create_sampling_client(model_path=path))),
        "load": told(lambda: steps(service.create_training_client_from_state(path).result(), 1)),
        "info": told(lambda: rest.get_weights_info_by_tinker_path(path)),
        "copy": told(lambda: rest.copy_weights(path, "mine")),
        "run": told(lambda: rest.get_training_run(model_id)),
        "list": told(lambda: rest.list_checkpoints(model_id)),
        "session": told(lambda: rest.get_session(model_id.partition(":")[0])),
    }
    came["own"] = [one["tinker_path"] for one in checkpoints(rest)]
    return came


def change(service: tinker.ServiceClient, rest: tinker.RestClient, base: str, path: str) -> object:
    """What is told of changes to another's weights."""
    return {
        "delete": told(lambda: rest.delete_checkpoint_from_tinker_path(path)),
        "ttl": told(lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 3600)),
        "publish": told(lambda: rest.publish_checkpoint_from_tinker_path(path)),
        "unpublish": told(lambda: rest.unpublish_checkpoint_from_tinker_path(path)),
    }


def unpublish(service: tinker.ServiceClient, rest: tinker.RestClient, base: str, path: str) -> object:
    """Weights are their owner's alone again."""
    return told(lambda: rest.unpublish_checkpoint_from_tinker_path(path))


def copy(service: tinker.ServiceClient, rest: tinker.RestClient, base: str) -> object:
    """Copies of weights, in a project of their own; the first is deleted, and the copy is trained from."""
    training = service.create_lora_training_client(base, rank=4, seed=7, user_metadata={"renderer": "plain"})
    training = training.result()
    steps(training, 2)
    path = training.save_state("whole", ttl_seconds=3600, user_metadata={"step": "2"}).result().path
    other = rest.copy_weights(path, "p2", ttl_seconds=7200).result()
    copied = rest.copy_weights(path, "p2").result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    whole = steps(training, 2)
    resumed = service.create_training_client_from_state_with_optimizer(copied).result()
    model_id = copied.removeprefix("tinker://").partition("/")[0]
    return {
        "path": path,
        "copies": [other, copied],
        "whole": whole,
        "resumed": steps(resumed, 2),
        "listed": checkpoints(rest),
        "runs": [
            run.training_run_id for run in rest.list_training_runs(project_id="p2").result().training_runs
        ],
        "metadata": rest.get_training_run(model_id).result().user_metadata,
        "token": told(lambda: rest.copy_weights(path, "p2", weights_access_token="t")),
    }


def download(service: tinker.ServiceClient, rest: tinker.RestClient, base: str, into: str) -> object:
    """Weights for other programs, as files; and addresses that are not good."""
    training = made(service, base)
    steps(training, 2)
    state = training.save_state("state").result().path
    path = training.save_weights_external("whole").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        with urllib.request.urlopen(url) as file:
            (Path(into) / name).write_bytes(file.read())
    [url, *_] = urls.values()
    came = {"path": path, "files": sorted(urls), "state": state}
    name = sorted(urls)[-1]
    came["odd"] = [status(url[:-1] + ("0" if url[-1] != "0" else "1")), status(url.partition("?")[0])]
    came["odd"].append(status(urls[name].replace(name, "..%2F..%2Fstore.json")))
    rest.delete_checkpoint_from_tinker_path(path).result()
    came["deleted"] = status(url)
    came["later"] = told(lambda: rest.get_external_weights_urls(path))
    came["goes on"] = len(steps(training, 1))
    return came


def status(url: str) -> int:
    """The status of an address."""
    try:
        return urllib.request.urlopen(url).status
    except urllib.error.HTTPError as error:
        return error.code


def some(service: tinker.ServiceClient, rest: tinker.RestClient, base: str) -> object:
    """Weights of each sort, of which one is deleted."""
    training = made(service, base)
    steps(training, 1)
    path = training.save_state("state", ttl_seconds=7200, user_metadata={"step": "1"}).result().path
    training.save_weights_for_sampler("best").result()
    training.save_state("gone").result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint(training.model_id, "weights/gone").result()
    rest.copy_weights(path, "p2").result()
    return {"model": training.model_id, "path": path} | read(service, rest, base)


def read(service: tinker.ServiceClient, rest: tinker.RestClient, base: str) -> dict[str, object]:
    """All that there is."""
    runs = rest.list_training_runs().result().training_runs
    return {"runs": [json.loads(run.model_dump_json()) for run in runs], "checkpoints": checkpoints(rest)}


def load(service: tinker.ServiceClient, rest: tinker.RestClient, base: str, path: str) -> object:
    """What is told of a load, and of a sampler."""
    return {
        "load": told(lambda: steps(service.create_training_client_from_state(path).result(), 1)),
        "open": told(lambda: tokens(service.create_sampling_client(model_path=path))),
    }


if __name__ == "__main__":
    url, what, options = sys.argv[1], sys.argv[2], json.loads((sys.argv[3:] or ["{}"])[0])
    named = options.pop("session", {})
    at = {"base_url": url, "api_key": options.pop("key", "tml-none")}
    clients = tinker.ServiceClient(**at, **named), tinker.RestClient(**at)
    print(json.dumps(globals()[what](*clients, **options)))
