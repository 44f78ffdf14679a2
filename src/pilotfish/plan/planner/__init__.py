"""What to buy: deployments of a target, with and without drafts and prefill workers, under a load and limits."""
