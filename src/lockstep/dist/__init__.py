"""Communication between ranks: collectives, groups, and starting and ending the default group."""

from torch.distributed import ReduceOp

from lockstep.device import cast_data_device, get_data_device, get_device
from lockstep.dist.broadcast import all_to_all, barrier, broadcast
from lockstep.dist.consistency import check_collectives, local_main_process_first, main_process_first
from lockstep.dist.gather import all_gather, gather, scatter
from lockstep.dist.nested import (
    all_gather_tree,
    all_reduce_dict,
    all_reduce_params,
    all_reduce_tree,
    broadcast_tree,
    sync_random_seed,
)
from lockstep.dist.objects import (
    all_gather_object,
    broadcast_object,
    broadcast_object_list,
    gather_object,
    run_on_main,
    scatter_object_list,
)
from lockstep.dist.reduce import all_reduce, reduce, reduce_scatter
from lockstep.dist.results import collect_results, collect_results_cpu, collect_results_gpu
from lockstep.dist.world import destroy_dist, init_dist, init_local_group, is_distributed
from lockstep.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerError
from lockstep.groups import (
    get_backend,
    get_comm_device,
    get_default_group,
    get_dist_info,
    get_local_group,
    get_local_rank,
    get_local_size,
    get_node_rank,
    get_num_nodes,
    get_rank,
    get_world_size,
    is_main_process,
    master_only,
)
from lockstep.topology import infer_launcher
from lockstep.transport.handles import Handle

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Handle",
    "PeerError",
    "ReduceOp",
    "all_gather",
    "all_gather_object",
    "all_gather_tree",
    "all_reduce",
    "all_reduce_dict",
    "all_reduce_params",
    "all_reduce_tree",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_object_list",
    "broadcast_tree",
    "cast_data_device",
    "check_collectives",
    "collect_results",
    "collect_results_cpu",
    "collect_results_gpu",
    "destroy_dist",
    "gather",
    "gather_object",
    "get_backend",
    "get_comm_device",
    "get_data_device",
    "get_default_group",
    "get_device",
    "get_dist_info",
    "get_local_group",
    "get_local_rank",
    "get_local_size",
    "get_node_rank",
    "get_num_nodes",
    "get_rank",
    "get_world_size",
    "infer_launcher",
    "init_dist",
    "init_local_group",
    "is_distributed",
    "is_main_process",
    "local_main_process_first",
    "main_process_first",
    "master_only",
    "reduce",
    "reduce_scatter",
    "run_on_main",
    "scatter",
    "scatter_object_list",
    "sync_random_seed",
]
