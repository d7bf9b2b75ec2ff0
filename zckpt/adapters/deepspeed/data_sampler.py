"""The sampler of DeepSpeed's curriculum learning, as a plain tree. This file has all code that uses its attributes.

    {"batch": <int64 array>, "consumed_samples": 96, "curriculum_step": 12, "current_difficulties": {"seqlen": 40},
     "clusters": [{"name": "cluster_seqlen20", "position": 32, "samples": <array>}, ...], "rng": "{...}"}

Rank 0 draws the samples for all ranks. It keeps the samples of each difficulty, in the order in which they are drawn,
in a file of the directory ``data_cluster_path``. The next reshuffle changes the file, so the tree has its content. The
sampler has a random number generator of its own, which its ``state_dict`` does not have.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from zckpt.errors import FormatError, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_COUNTS = ("consumed_samples", "curriculum_step")
_NAME_MAX = 200
"""The longest name of a cluster. Its files have longer names, of which a file system allows 255 bytes."""


def sampler_of(engine: Any) -> Any:
    """Returns the sampler of an engine that learns by a curriculum and loads its data itself, or None."""
    enabled = hasattr(engine, "curriculum_learning_enabled") and engine.curriculum_learning_enabled()
    return getattr(engine.training_dataloader, "data_sampler", None) if enabled else None


def capture(sampler: Any) -> dict[str, Any]:
    """Returns the tree of a sampler. Only that of rank 0 has the clusters."""
    columns = (sampler.data_cluster_paths, sampler.data_cluster_current_position)
    clusters = [] if sampler.global_rank else zip(sampler.data_clusters, *columns, strict=True)
    return {
        "batch": np.array(sampler.batch, np.int64),
        **{name: int(getattr(sampler, name)) for name in _COUNTS},
        "current_difficulties": dict(sampler.current_difficulties),
        "clusters": [
            {"name": name.rpartition("/")[2], "position": int(position), "samples": np.array(cluster[0])}
            for cluster, name, position in clusters
        ],
        "rng": json.dumps(sampler.np_rng.bit_generator.state),
    }


def check(tree: Any) -> None:
    """Raises FormatError if a tree is not one that ``capture`` has made."""
    clusters: Any = tree.get("clusters") if isinstance(tree, dict) else None
    valid = isinstance(clusters, list) and all(map(_is_cluster, clusters))
    valid = valid and len({cluster["name"] for cluster in clusters}) == len(clusters)
    valid = valid and _is_list_of_ints(tree.get("batch")) and isinstance(tree.get("current_difficulties"), dict)
    if not valid or not all(type(tree.get(name)) is int and tree[name] >= 0 for name in _COUNTS):
        raise FormatError("state: data_sampler is not the state of a curriculum's sampler")
    try:
        np.random.default_rng().bit_generator.state = json.loads(tree["rng"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError("state: data_sampler.rng is not the state of a random number generator") from error


def _is_cluster(cluster: Any) -> bool:
    if not (isinstance(cluster, dict) and isinstance(cluster.get("samples"), np.ndarray)):
        return False
    name, samples = cluster.get("name"), cluster["samples"]
    position: Any = cluster.get("position", -1)
    # The name becomes that of a file.
    named = isinstance(name, str) and name.startswith("cluster") and name.isprintable() and "/" not in name
    counted = _is_list_of_ints(samples) and type(position) is int and 0 <= position <= samples.size > 0
    return named and len(str(name)) <= _NAME_MAX and counted


def _is_list_of_ints(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.ndim == 1


def restore(tree: Mapping[str, Any], sampler: Any) -> None:
    """Sets the state of a sampler to that of a tree that ``check`` has checked. On rank 0, writes the files of its
    clusters anew. Raises StorageError."""
    sampler.np_rng.bit_generator.state = json.loads(tree["rng"])
    sampler.batch = tree["batch"].tolist()
    for name in _COUNTS:
        setattr(sampler, name, tree[name])
    sampler.current_difficulties = dict(tree["current_difficulties"])
    sampler.data_cluster_paths = [cluster["name"] for cluster in tree["clusters"]]
    sampler.data_cluster_current_position = [cluster["position"] for cluster in tree["clusters"]]
    if sampler.global_rank:
        return
    directory = sampler.data_efficiency_config["data_sampling"]["curriculum_learning"]["data_cluster_path"]
    sampling = sys.modules[type(sampler).__module__]
    sampler.data_clusters, sampler.data_cluster_sizes = [], []
    try:
        for cluster in tree["clusters"]:
            path, samples = f"{directory}/{cluster['name']}", cluster["samples"]
            builder = sampling.create_mmap_dataset_builder(path, sampler.index_dtype)
            builder.add_item_numpy(samples.astype(sampler.index_dtype))
            sampling.close_mmap_dataset_builder(builder, path)
            sampler.data_clusters.append(sampling.MMapIndexedDataset(path, skip_warmup=True))
            sampler.data_cluster_sizes.append(len(samples))
    except OSError as error:
        raise StorageError(f"a file of data_cluster_path cannot be written: {error}", file=str(directory)) from error
