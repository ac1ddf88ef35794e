{{/*
All pools as a JSON array: prefill before decode, each role's own pool before the further ones by name. ringserve
numbers the rings in this order. A further pool inherits its role's values, except its size and its number of rings.
*/}}
{{- define "ringserve.pools" -}}
{{- $pools := list }}
{{- range $role := list "prefill" "decode" }}
{{- $first := omit (index $.Values $role) "pools" }}
{{- $pools = append $pools (dict "role" $role "key" $role "group" $role "name" "" "values" $first) }}
{{- range $name, $own := (index $.Values $role).pools }}
{{- $values := set (omit $first "config" "minReplicas" "maxReplicas") "replicas" 1 }}
{{- range $key, $value := $own }}
{{- $values = set $values $key $value }}
{{- end }}
{{- $key := printf "%s.pools.%s" $role $name }}
{{- $group := printf "%s-%s" $role $name }}
{{- $pools = append $pools (dict "role" $role "key" $key "group" $group "name" $name "values" $values) }}
{{- end }}
{{- end }}
{{- toJson $pools }}
{{- end }}

{{/* Number of rings of a role in all its pools. Called with (dict "root" $ "role" name). */}}
{{- define "ringserve.numRings" -}}
{{- $rings := 0 }}
{{- range $pool := include "ringserve.pools" .root | fromJsonArray }}
{{- if eq $pool.role $.role }}
{{- $rings = add $rings $pool.values.replicas }}
{{- end }}
{{- end }}
{{- $rings }}
{{- end }}

{{/* Size of one pool as ringserve's configuration has it. Called with the pool. */}}
{{- define "ringserve.poolConfig" -}}
{{- dict "rings" (int .values.replicas) "cp" (int .values.parallelism.cp) "tp" (int .values.parallelism.tp) | toJson }}
{{- end }}
