"""`pilotfish plan`: devices and times go in, what to buy and what speculation gives come out. `command.py` first;
`calibrate.py` and `record.py` (`bench record`) measure what `plan simulate` takes."""
