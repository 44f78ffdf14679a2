"""`pilotfish plan`: devices and times go in, what to buy and what speculation gives come out. `command.py` first;
`calibrate.py` measures what `plan simulate` takes."""
