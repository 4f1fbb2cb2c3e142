"""grpocli's algorithms in your own training loop. The policy is a table of logits, one distribution for each prompt."""

import torch

import grpocli

P, G, T, V = 4, 8, 6, 10  # prompts, group size, tokens, vocabulary; token 0 ends a completion


def logp_of(policy: torch.nn.Embedding, prompts_B: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Log-probs [B, T], in nats, of the tokens that were sampled."""
    return policy(prompts_B).log_softmax(-1).gather(1, tokens_BT)


def rewards_of(prompts_B: torch.Tensor, tokens_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """{name: [P, G]}: the share of tokens that repeat the prompt's number, and 1 for a completion that ends."""
    right_BT = (tokens_BT == 1 + prompts_B.unsqueeze(1)) & mask_BT.bool()
    share_B = right_BT.sum(1) / mask_BT.sum(1)
    ended_B = ((tokens_BT == 0) & mask_BT.bool()).any(1).float()
    return {"right": share_B.reshape(P, G), "ended": ended_B.reshape(P, G)}


def train(steps: int = 40, micro_batches: int = 2) -> list[float]:
    """The mean of the reward `right` at each step."""
    torch.manual_seed(0)
    algorithm = grpocli.build_algorithm("algorithm=dgpo", "algorithm/kl=k3", "algorithm.kl.beta=0.001")
    policy, reference = torch.nn.Embedding(P, V), torch.nn.Embedding(P, V)
    reference.load_state_dict(policy.state_dict())
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    prompts_B = torch.arange(P).repeat_interleave(G)  # also the group of each row
    history = []
    for _ in range(steps):
        with torch.no_grad():
            tokens_BT = policy(prompts_B).softmax(-1).multinomial(T, replacement=True)
            ends_BT = (tokens_BT == 0).long().cumsum(1)
            mask_BT = (ends_BT - (tokens_BT == 0).long() == 0).long()  # 1 up to and including the first end
            old_logp_BT = logp_of(policy, prompts_B, tokens_BT)
            ref_logp_BT = logp_of(reference, prompts_B, tokens_BT)
        rewards = rewards_of(prompts_B, tokens_BT, mask_BT)
        history.append(rewards["right"].mean().item())

        advantages_B = algorithm.advantages(rewards, weights={"right": 1.0, "ended": 0.1}).reshape(-1)
        # counts of all rows, so that the sum of the losses does not depend on the split
        totals = algorithm.totals(advantages_B, mask_BT, group_ids=prompts_B, micro_batches=micro_batches)
        for rows in torch.arange(P * G).chunk(micro_batches):
            loss, _metrics = algorithm.loss(
                logp_of(policy, prompts_B[rows], tokens_BT[rows]),
                old_logp_BT[rows],
                advantages_B[rows],
                mask_BT[rows],
                group_ids=prompts_B[rows],
                ref_logp=ref_logp_BT[rows],
                totals=totals,
            )
            loss.backward()  # losses and metrics of the parts add up to those of the whole
        optimizer.step()
        optimizer.zero_grad()
    return history


if __name__ == "__main__":
    for step, right in enumerate(train()):
        print(f"step {step:2}  right {right:.2f}")
