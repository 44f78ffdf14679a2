"""Token ids of requests whose callers allow it: folders of them, which servers write and trainings read."""
