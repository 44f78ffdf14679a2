"""Imported first, it leaves out of transformers what serving does without, as workers' own processes do."""

from pilotfish.model.loading.serving_imports import import_for_serving

import_for_serving()
