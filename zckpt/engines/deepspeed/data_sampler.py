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

from zckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

_COUNTS = ("consumed_samples", "curriculum_step")


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
    clusters = tree.get("clusters") if isinstance(tree, dict) else None
    valid = isinstance(clusters, list) and all(map(_is_cluster, clusters))
    valid = valid and isinstance(tree.get("batch"), np.ndarray) and isinstance(tree.get("current_difficulties"), dict)
    if not valid or not all(type(tree.get(name)) is int for name in _COUNTS) or not isinstance(tree.get("rng"), str):
        raise FormatError("state: data_sampler is not the state of a curriculum's sampler")


def _is_cluster(cluster: Any) -> bool:
    if not (isinstance(cluster, dict) and isinstance(cluster.get("samples"), np.ndarray)):
        return False
    name, position, samples = cluster.get("name"), cluster.get("position"), cluster["samples"]
    # The name becomes that of a file.
    named = isinstance(name, str) and name.startswith("cluster") and not {"/", "\0"} & {*name}
    return named and samples.dtype.kind in "iu" and samples.ndim == 1 and type(position) is int and position >= 0


def restore(tree: Mapping[str, Any], sampler: Any) -> None:
    """Sets the state of a sampler. On rank 0, writes the files of its clusters anew. Raises FormatError."""
    try:
        sampler.np_rng.bit_generator.state = json.loads(tree["rng"])
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError("state: data_sampler.rng is not the state of its random number generator") from error
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
    for cluster in tree["clusters"]:
        path, samples = f"{directory}/{cluster['name']}", cluster["samples"]
        builder = sampling.create_mmap_dataset_builder(path, sampler.index_dtype)
        builder.add_item_numpy(samples.astype(sampler.index_dtype))
        sampling.close_mmap_dataset_builder(builder, path)
        sampler.data_clusters.append(sampling.MMapIndexedDataset(path, skip_warmup=True))
        sampler.data_cluster_sizes.append(len(samples))
