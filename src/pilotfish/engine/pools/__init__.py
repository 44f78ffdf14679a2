"""What draft pools and prefill pools have in common for an engine: workers started, members dialled, waited for and
left. Open remote_pools.py first."""
