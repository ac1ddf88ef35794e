{{/*
All pools as a JSON array, those of prefill first, each role's own before its further ones by name: the order in which
ringserve numbers their rings. A further pool takes from its role what it does not say itself, but for its size
and how many rings it has.
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
{{- $pools = append $pools (dict "role" $role "key" (printf "%s.pools.%s" $role $name) "group" (printf "%s-%s" $role $name) "name" $name "values" $values) }}
{{- end }}
{{- end }}
{{- toJson $pools }}
{{- end }}

{{/* How many rings a role has in all its pools. Called with (dict "root" $ "role" name). */}}
{{- define "ringserve.numRings" -}}
{{- $rings := 0 }}
{{- range $pool := include "ringserve.pools" .root | fromJsonArray }}
{{- if eq $pool.role $.role }}
{{- $rings = add $rings $pool.values.replicas }}
{{- end }}
{{- end }}
{{- $rings }}
{{- end }}

{{/* What ringserve's configuration says of one pool. Called with the pool. */}}
{{- define "ringserve.poolConfig" -}}
{{- dict "rings" (int .values.replicas) "cp" (int .values.parallelism.cp) "tp" (int .values.parallelism.tp) | toJson }}
{{- end }}
