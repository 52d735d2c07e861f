{{- define "headrace.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .kind }}
{{- end -}}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{/* Name and labels of an object of the service `kind`; `name` where it has another than the service's. */}}
{{- define "headrace.metadata" -}}
name: {{ include "headrace.name" .root }}-{{ .name | default .kind }}
labels: {{- include "headrace.labels" . | nindent 2 }}
{{- end -}}

{{- define "headrace.secret" -}}
{{- .Values.secret.existing | default (printf "%s-secrets" (include "headrace.name" .)) -}}
{{- end -}}

{{/* The secret with the certificate of a role. */}}
{{- define "headrace.certificate" -}}
{{- .root.Values.tls.existing | default (printf "%s-tls" (include "headrace.name" .root)) }}-{{ .role -}}
{{- end -}}

{{- define "headrace.claim" -}}
{{- (index .root.Values.storage .volume).existingClaim | default (printf "%s-%s" (include "headrace.name" .root) .volume) -}}
{{- end -}}

{{/* A value as it was written: Helm reads numbers as floats, of which large ones would be 1e+08. */}}
{{- define "headrace.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) (lt . 1e15) (gt . -1e15) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{- define "headrace.image" -}}
image: "{{ .root.Values.images.prefix }}/{{ .image }}:{{ include "headrace.text" .root.Values.images.tag }}"
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
{{- end -}}

{{/* How many instances a pod has; `devices` is one for each GPU. */}}
{{- define "headrace.instances" -}}
{{- $settings := index .root.Values .kind -}}
{{- $count := $settings.instancesPerPod | default 1 -}}
{{- if eq (toString $count) "devices" -}}
{{- if not $settings.gpus -}}
{{- fail (printf "%s.instancesPerPod: `devices` needs %s.gpus; without GPUs write a number" .kind .kind) -}}
{{- end -}}
{{- $count = $settings.gpus -}}
{{- end -}}
{{- int $count -}}
{{- end -}}

{{/* Memory for two versions of a model of `modelGiB`, with a tenth to spare; empty: what the service's values say. */}}
{{- define "headrace.weightsGi" -}}
{{- $model := float64 .root.Values.modelGiB -}}
{{- if and $model (has .kind (list "rollout" "trainer")) }}{{ mulf $model 2.2 | ceil | int }}Gi{{ end -}}
{{- end -}}

{{/*
Memory of a pod for a model of `modelGiB`: its versions, 32 GiB for what is of no model's size and, of trainers, what
lies on the host while rollouts have the GPUs and while a checkpoint is written: 30 bytes a weight, divided over pods.
*/}}
{{- define "headrace.memoryGi" -}}
{{- $model := float64 .root.Values.modelGiB -}}
{{- if and $model (has .kind (list "rollout" "trainer")) -}}
{{- $asleep := ternary (divf (mulf $model 15.0) (max 1 (int .root.Values.trainer.replicas))) 0.0 (eq .kind "trainer") -}}
{{ addf (mulf $model 2.2) $asleep 32.0 | ceil | int }}Gi
{{- end -}}
{{- end -}}

{{/* Of a claim without a size: 100 GiB, and of `modelGiB` four checkpoints of 12 bytes a weight with an export, or two models. */}}
{{- define "headrace.claimGi" -}}
{{ addf 100.0 (mulf (float64 .root.Values.modelGiB) (ternary 25.0 2.0 (eq .volume "data"))) | ceil | int }}Gi
{{- end -}}

{{/* `resources` of a container. With `cpuLimits` what is asked for is the limit too, where no other is given. */}}
{{- define "headrace.resources" -}}
{{- $found := deepCopy .resources -}}
{{- $limits := $found.limits | default dict -}}
{{- if and .root.Values.cpuLimits (not (hasKey $limits "cpu")) -}}
{{- $found = mustMergeOverwrite $found (dict "limits" (dict "cpu" (($found.requests | default dict).cpu | default "1"))) -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* A Deployment or StatefulSet of the service `kind`: `spec` has what it alone has. */}}
{{- define "headrace.controller" -}}
{{- $queue := .root.Values.kueue -}}
apiVersion: apps/v1
kind: {{ .controller }}
metadata:
  {{- include "headrace.metadata" . | nindent 2 }}
    {{- if and $queue.queue (has .kind (list "rollout" "trainer" "reward" "simulator")) }}
    kueue.x-k8s.io/queue-name: {{ $queue.queue }}
    {{- with $queue.priorityClass }}
    kueue.x-k8s.io/priority-class: {{ . }}
    {{- end }}
    {{- end }}
spec:
  {{- .spec | trim | nindent 2 }}
  selector:
    matchLabels: {{- include "headrace.selector" . | nindent 6 }}
  template: {{- include "headrace.pod" . | nindent 4 }}
{{- end -}}
