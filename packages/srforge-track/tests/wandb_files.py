"""Read the file that an offline W&B run leaves, without W&B's own reader (LevelDB log format, W&B's messages)."""

import json
import struct

from wandb.proto import wandb_internal_pb2

_BLOCK = 32768


def offline_runs(folder):
    return sorted((folder / "wandb").glob("offline-run-*"))


def records(folder):
    (path,) = folder.glob("*.wandb")
    data, position, text = path.read_bytes(), 7, b""
    found = []
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        if kind == 0:
            break
        chunk = data[position + 7 : position + 7 + length]
        position += 7 + length
        text = text + chunk if kind in {3, 4} else chunk
        if kind in {1, 4}:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            found.append(record)
    return found


def rows(folder):
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def config(folder):
    found = {}
    for record in records(folder):
        if record.WhichOneof("record_type") == "config":
            found |= {item.key: json.loads(item.value_json) for item in record.config.update}
        if record.WhichOneof("record_type") == "run":
            found |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return found


def exit_codes(folder):
    return [record.exit.exit_code for record in records(folder) if record.WhichOneof("record_type") == "exit"]


def metrics(folder):
    return [record.metric for record in records(folder) if record.WhichOneof("record_type") == "metric"]
