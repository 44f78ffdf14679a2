"""`pilotfish plan`: devices and times go in, what to buy and what speculation gives come out. `command.py` first;
`plan_calibrate.py` and `plan_record.py` (`bench record`) measure what `plan simulate` takes."""
