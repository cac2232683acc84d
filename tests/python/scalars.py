"""Reads a folder of event files with TensorBoard's own reader and prints its scalars as JSON: folder."""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main():
    # By default the reader keeps a sample of the steps.
    events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
    events.Reload()
    scalars = {
        tag: [[event.step, event.value] for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    print(json.dumps(scalars))


main()
