"""Data that the model itself makes: REINFORCE on a walk that is rewarded for reaching the origin."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Session
from lockstep.dist import all_reduce_dict

session = Session(
    "work_dirs/rollouts",
    strategy=sys.argv[1] if sys.argv[1:] else None,
    clip_grad=dict(max_norm=1.0),
    randomness=dict(seed=0),  # each rank acts on random numbers of its own
)
policy = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
starts = torch.randint(-5, 6, (512, 1), generator=torch.Generator().manual_seed(0)).float()
policy, optimizer, loader = session.prepare(
    policy, optimizer, DataLoader(TensorDataset(starts), batch_size=64, shuffle=True)
)

for _ in session.epochs(10):
    rewards = 0.0
    for (places,) in loader:
        visited, actions = [], []
        for _ in range(8):
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=policy(places / 5)).sample()
            visited.append(places / 5)
            actions.append(action)
            places = places + 2 * action.unsqueeze(1).float() - 1
        reward = -places.squeeze(1).abs()
        chosen = torch.distributions.Categorical(logits=policy(torch.stack(visited))).log_prob(torch.stack(actions))
        session.step(-(chosen.sum(0) * (reward - reward.mean())).mean(), reward=reward.mean())
        rewards += reward.mean().item() / len(loader)
    session.log_metrics(**all_reduce_dict({"distance": -rewards}, "mean"))
