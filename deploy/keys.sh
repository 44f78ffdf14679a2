#!/bin/sh
# Keys of a cluster's roles, who may come to whom, and the members file:
#   deploy/keys.sh DIRECTORY TARGETS DRAFT_POOLS PREFILL_POOLS
# An address has its number for #, as in tcp://pilotfish-target-#.pilotfish-target:7000; $TARGET, $DRAFT and $PREFILL are others.
set -eu
[ $# -eq 4 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
for count in "$2" "$3" "$4"; do
    case $count in '' | *[!0-9]*) echo "$0: '$count' is not allowed; expected how many there are, 0 or more" >&2; exit 2 ;; esac
done
directory=$1
mkdir -p -m 0700 "$directory"

for role in api target draft prefill; do
    [ -e "$directory/$role.key" ] || pilotfish keys new "$directory/$role" > /dev/null
done

public() { sed -n 's/^public //p' "$directory/$1.key"; }
api=$(public api) target=$(public target)
echo "$api api 1" > "$directory/servers.allow"       # who may come to targets
echo "$target target 1" > "$directory/targets.allow" # who may come to pools

# Members of a role: its name, how many there are, their address.
members() {
    key=$(public "$1") i=0 comma=
    while [ "$i" -lt "$2" ]; do
        printf '%s\n    {"name": "%s", "endpoint": "%s", "key": "%s"}' "$comma" "$1-$i" "$(echo "$3" | sed "s/#/$i/")" "$key"
        i=$((i + 1)) comma=,
    done
}

cat > "$directory/members.json" <<END
{
  "targets": [$(members target "$2" "${TARGET:-tcp://pilotfish-target-#.pilotfish-target:7000}")
  ],
  "draft_pools": [$(members draft "$3" "${DRAFT:-tcp://pilotfish-draft-#.pilotfish-draft:7070}")
  ],
  "prefill_pools": [$(members prefill "$4" "${PREFILL:-tcp://pilotfish-prefill-#.pilotfish-prefill:7080}")
  ]
}
END
