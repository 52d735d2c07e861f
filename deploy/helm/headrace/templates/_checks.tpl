{{/* What cannot be, in words. What one key alone can be is in values.schema.json. */}}
{{- define "headrace.checks" -}}
{{- $values := .Values -}}
{{- if not (or $values.secret.existing (.Capabilities.APIVersions.Has "v1/Secret")) -}}
{{- fail (printf "secret.existing: this is rendered without a cluster, where each rendering would make other secrets. Make one secret, and name it: kubectl -n %s create secret generic %s --from-literal=fleet-token=… --from-literal=http-token=… --from-literal=redis-password=…" .Release.Namespace (include "headrace.secret" .)) -}}
{{- end -}}
{{- if not (or $values.redis.enabled $values.redis.url) -}}
{{- fail "redis.url: name your Redis, or set redis.enabled to true" -}}
{{- end -}}
{{- if and $values.serviceAccount.create (not $values.serviceAccount.name) -}}
{{- fail "serviceAccount.name: name the account that serviceAccount.create makes" -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.host) -}}
{{- fail "ingress.host: write the name by which users reach the API, such as headrace.example" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not (and $values.httpRoute.parentRefs $values.httpRoute.hostnames)) -}}
{{- fail "httpRoute: write parentRefs (the Gateway) and hostnames, such as [headrace.example]" -}}
{{- end -}}
{{- if and $values.kueue.priorityClass (not $values.kueue.queue) -}}
{{- fail "kueue.queue: name the LocalQueue in which kueue.priorityClass counts" -}}
{{- end -}}
{{- include "headrace.checkScaling" . -}}
{{- include "headrace.checkRights" . -}}
{{- include "headrace.checkSizes" . -}}
{{- end -}}

{{- define "headrace.checkScaling" -}}
{{- $values := .Values -}}
{{- range $kind, $scaled := $values.autoscaling -}}
{{- if ne $scaled.by "none" -}}
{{- if $values.scaler.enabled -}}
{{- fail (printf "autoscaling.%s.by: `%s` and scaler.enabled would both set the number of pods; choose one" $kind $scaled.by) -}}
{{- end -}}
{{- if hasKey ($values.coordinator.env | default dict) "HEADRACE_AUTOSCALE" -}}
{{- fail (printf "coordinator.env.HEADRACE_AUTOSCALE: autoscaling.%s.by: `%s` sets the number of pods; choose one" $kind $scaled.by) -}}
{{- end -}}
{{- if gt (int $scaled.min) (int $scaled.max) -}}
{{- fail (printf "autoscaling.%s: min is above max" $kind) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $values.kueue.queue (or $values.scaler.enabled (ne $values.autoscaling.trainer.by "none")) -}}
{{- fail "kueue.queue: Kueue admits the trainers' pods as one group of a fixed number; set scaler.enabled to false and autoscaling.trainer.by to none" -}}
{{- end -}}
{{- end -}}

{{/* Who asks for more than the namespace's level of Pod Security allows learns it here, not from pods that do not come. */}}
{{- define "headrace.checkRights" -}}
{{- $values := .Values -}}
{{- $asked := list -}}
{{- if $values.usersCode.ownUser }}{{ $asked = append $asked "usersCode.ownUser" }}{{ end -}}
{{- range $volume := list "weights" "cache" -}}
{{- if (index $values.storage $volume).hostPath }}{{ $asked = append $asked (printf "storage.%s.hostPath" $volume) }}{{ end -}}
{{- end -}}
{{- range $kind := keys (include "headrace.pods" . | fromYaml) | sortAlpha -}}
{{- $set := mustMergeOverwrite (deepCopy $values.pod) (deepCopy (index $values $kind)) -}}
{{- if $set.hostNetwork -}}
{{- $asked = append $asked (printf "%s.hostNetwork" $kind) -}}
{{- if and $values.networkPolicy.enabled (not $values.networkPolicy.nodes) -}}
{{- fail (printf "networkPolicy.nodes: %s.hostNetwork gives pods the addresses of their nodes, which policies do not know as the fleet's; write the nodes' networks, such as [10.0.0.0/16]" $kind) -}}
{{- end -}}
{{- end -}}
{{- if (($set.rdma | default dict).resource) }}{{ $asked = append $asked (printf "%s.rdma" $kind) }}{{ end -}}
{{- range $set.extraVolumes -}}
{{- if .hostPath }}{{ $asked = append $asked (printf "%s.extraVolumes (%s)" $kind .name) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and $asked (ne $values.podSecurity "privileged") -}}
{{- fail (printf "podSecurity: `%s` refuses %s. Leave these out, or label the namespace pod-security.kubernetes.io/enforce=privileged and set podSecurity to privileged" $values.podSecurity (join ", " $asked)) -}}
{{- end -}}
{{- end -}}

{{- define "headrace.gib" -}}
{{- $unit := regexFind "[A-Za-z]*$" . -}}
{{- $size := index (dict "m" 9.3e-13 "" 9.31e-10 "k" 9.31e-7 "Ki" 9.54e-7 "M" 9.31e-4 "Mi" 9.77e-4 "G" 0.931 "Gi" 1.0 "T" 931.0 "Ti" 1024.0 "P" 931323.0 "Pi" 1048576.0) $unit -}}
{{- mulf (float64 (trimSuffix $unit .)) $size -}}
{{- end -}}

{{- define "headrace.checkSizes" -}}
{{- $values := .Values -}}
{{- $model := float64 $values.modelGiB -}}
{{- range $volume, $needed := dict "models" $model "data" (mulf $model 18.0) -}}
{{- $claim := index $values.storage $volume -}}
{{- if and $claim.size (not $claim.existingClaim) (lt (float64 (include "headrace.gib" $claim.size)) $needed) -}}
{{- fail (printf "storage.%s.size: %s is below the %.0f GiB of %s; write more, or \"\" for what fits modelGiB" $volume $claim.size (ceil $needed) (ternary "the model" "three checkpoints: two that are kept and one that is written" (eq $volume "models"))) -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "rollout" "trainer" "simulator" -}}
{{- $set := index $values $kind -}}
{{- $limit := ($set.resources.limits | default dict).memory -}}
{{- if and $limit (not (include "headrace.memoryGi" (dict "root" $ "kind" $kind))) -}}
{{- $volumes := addf (float64 (include "headrace.gib" $set.shm)) (float64 (include "headrace.gib" $set.weights)) -}}
{{- if ge $volumes (float64 (include "headrace.gib" (toString $limit))) -}}
{{- fail (printf "%s.resources.limits.memory: %s holds the pod's /dev/shm (%s) and its weights (%s) too; write more" $kind (toString $limit) $set.shm $set.weights) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
