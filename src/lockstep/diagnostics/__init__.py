"""What a training does and how fast: times and slow ranks, FLOPs, traces, losses that break, replicas that differ."""

from __future__ import annotations

from lockstep.diagnostics.mfu import MFUHook
from lockstep.diagnostics.nan_check import NaNCheckHook
from lockstep.diagnostics.profiling import MemorySnapshotHook, ProfilerHook
from lockstep.diagnostics.replicas import ReplicaCheckHook
from lockstep.diagnostics.timer import IterTimerHook

__all__ = ["IterTimerHook", "MFUHook", "MemorySnapshotHook", "NaNCheckHook", "ProfilerHook", "ReplicaCheckHook"]
