#!/bin/bash
# Answer a config on all nodes of a Slurm job: sbatch sample_configs/ray/slurm.sh run.yaml
#SBATCH --job-name=ragspec
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-task=1
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_ADDRESS="$head:6379"

srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap ray start --head --port=6379 --block &
sleep 15
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" --overlap \
        ray start --address="$RAY_ADDRESS" --block &
fi
sleep 15

# after a time limit or a lost node, submit the job again: it continues where it stopped
ragspec generate --config "$1" --workers "$SLURM_JOB_NUM_NODES" --ray-address auto
