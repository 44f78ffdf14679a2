"""The conformance kit of the draft protocol: targets played at a drafter, which tell what rules that breaks."""
