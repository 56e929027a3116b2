"""What launchers really set for one process; what no reader looks at is mostly left out."""

from __future__ import annotations

Environment = dict[str, str]

TORCHRUN = {  # torchrun --nnodes 2 --nproc-per-node 2, local rank 1 of the second machine
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
TORCHRUN_UNEVEN = TORCHRUN | {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN_STANDALONE = {  # torchrun --standalone --nproc-per-node 2
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "42571",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

SLURM_STEP = {  # srun -N 2 -n 3, Slurm 22.05, the task on the second node
    "SLURM_CLUSTER_NAME": "lockstep",
    "SLURM_JOB_ID": "7",
    "SLURM_JOBID": "7",
    "SLURM_JOB_NODELIST": "n[01-02]",
    "SLURM_NODELIST": "n[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "2",
}
SLURM_NARROW_STEP = SLURM_STEP | {  # srun -N 1 -n 2, within sbatch -N 4 -n 8; the job's own variables stay
    "SLURM_JOB_NODELIST": "n[01-04]",
    "SLURM_NODELIST": "n[01-04]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_TASKS_PER_NODE": "2",
    "SLURM_STEP_ID": "4",
    "SLURM_STEP_NODELIST": "n03",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
}
SLURM_CYCLIC_STEP = SLURM_STEP | {  # srun -N 2 -n 4 --distribution=cyclic: rank 1 is on the second node
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "1",
}
SLURM_BATCH = {  # the body of an sbatch -N 2 -n 4 script
    "SLURM_CLUSTER_NAME": "lockstep",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "ENVIRONMENT": "BATCH",
}
SLURM_BATCH_WITHIN_STEP = SLURM_BATCH | {  # sbatch called by a task of another step, whose variables it inherits
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
SLURM_ALLOCATION = {  # the shell of an salloc -N 2 -n 4 on the machine where it was called
    name: value
    for name, value in SLURM_BATCH.items()
    if name not in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "ENVIRONMENT")
}
SLURM_INTERACTIVE_STEP = SLURM_BATCH | {  # the same on the first node: LaunchParameters=use_interactive_step
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PTY_PORT": "41435",
}
SLURM_PTY = SLURM_NARROW_STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_PTY_PORT": "41435"}

OPEN_MPI = {  # mpirun -n 2, Open MPI 4.1; NODE_RANK counts processes, not nodes
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1306853376.0;tcp://127.0.0.1:54551",
    "PMIX_NAMESPACE": "1306853377",
    "PMIX_RANK": "1",
}
OPEN_MPI_5 = {  # mpirun of Open MPI 5 (PRRTE), rank 5 of 6 on three nodes
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-node0-4711@1",
    "PMIX_RANK": "5",
    "PMIX_SERVER_URI41": "prterun-node2-815@0.3;tcp4://10.0.0.3:46337",
}
MPICH = {  # mpiexec of MPICH 4.0 or of Intel MPI
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
BARE_PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "8.0", "PMI_FD": "13"}
BARE_PMIX = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-node0-4711@1", "WORLD_SIZE": "2"}
