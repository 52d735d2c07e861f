{{/*
What differs between pods: the template of the container, the keys of the secret, the size of /tmp, claims and how they
are mounted, the time to end in, and whether they hold `devices`. An instance's supervisor gives a trainer 45 s, another
one 25, and whoever stops it 10 more. The coordinator goes last, after the trainers: they save checkpoints through it.
*/}}
{{- define "headrace.pods" -}}
coordinator: {container: coordinator, secrets: [fleet-token, http-token, redis-password], tmp: 256Mi, claims: {data: rw, models: ro, files: ro}, graceS: 105}
redis: {container: redis, secrets: [redis-password], claims: {}, graceS: 30}
rollout: {container: instance, secrets: [fleet-token], tmp: 2Gi, claims: {models: ro, files: ro}, devices: true, graceS: 40}
trainer: {container: instance, secrets: [fleet-token], tmp: 2Gi, claims: {models: ro, data: rw, files: ro}, devices: true, graceS: 60}
reward: {container: instance, secrets: [fleet-token], tmp: 2Gi, claims: {files: ro}, graceS: 40}
simulator: {container: instance, secrets: [fleet-token], tmp: 2Gi, claims: {files: ro}, devices: true, graceS: 40}
scaler: {container: scaler, secrets: [fleet-token], tmp: 64Mi, claims: {}, graceS: 30}
models: {container: models, secrets: [], tmp: 256Mi, claims: {models: rw}, graceS: 30}
{{- end -}}

{{/*
The pod template of any service. It needs no API server but where it is told to, and no variable of another service.
Keys of the service in values.yaml stand above those of `pod`.
*/}}
{{- define "headrace.pod" -}}
{{- $root := .root -}}
{{- $kind := .kind -}}
{{- $set := mustMergeOverwrite (deepCopy $root.Values.pod) (deepCopy (index $root.Values $kind)) -}}
{{- $is := index (include "headrace.pods" $root | fromYaml) $kind -}}
{{- $about := dict "root" $root "kind" $kind "set" $set "is" $is "tls" (not (has $kind (list "redis" "models"))) -}}
{{- if eq $kind "coordinator" }}{{ $_ := set $about "access" (include "headrace.access" $root | fromYaml) }}{{ end -}}
{{- $mounts := include "headrace.mounts" $about -}}
metadata:
  labels:
    {{- include "headrace.labels" . | nindent 4 }}
    {{- with $set.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- $annotations := deepCopy $set.podAnnotations }}
  {{- with $about.access }}{{ $_ := set $annotations "headrace/access" (toYaml . | sha256sum) }}{{ end }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- $account := $set.serviceAccountName | default $root.Values.serviceAccount.name }}
  {{- if eq $kind "scaler" }}{{ $account = printf "%s-scaler" (include "headrace.name" $root) }}{{ end }}
  {{- with $account }}
  serviceAccountName: {{ . }}
  {{- end }}
  automountServiceAccountToken: {{ or (eq $kind "scaler") $set.automountServiceAccountToken }}
  enableServiceLinks: false
  {{- with $root.Values.images.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "schedulerName" }}
  {{- with index $set $key }}
  {{ $key }}: {{- if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- end }}
  {{- with $set.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $own := dict "labelSelector" (dict "matchLabels" (include "headrace.selector" $about | fromYaml)) }}
    - {{- toYaml (mustMerge (deepCopy .) $own) | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- if $set.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  terminationGracePeriodSeconds: {{ $is.graceS }}
  {{- if eq $kind "models" }}
  restartPolicy: Never
  {{- end }}
  {{- $folders := include "headrace.nodeFolders" $about | fromYamlArray }}
  {{- if or $folders $set.initContainers }}
  initContainers:
    {{- if $folders }}
    # Folders of the node are root's as they are made. Whose they were before, they stay.
    - name: folders
      {{- include "headrace.image" (dict "root" $root "image" $set.image) | nindent 6 }}
      command:
        - sh
        - -ec
        - for each in {{ join " " $folders }}; do [ "$(stat -c %u $each)" != 0 ] || { chmod 0700 $each && chown 10001:10001 $each; }; done
      securityContext:
        runAsNonRoot: false
        runAsUser: 0
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL], add: [CHOWN]}
      resources: {{- include "headrace.resources" (dict "root" $root "resources" (dict "requests" (dict "cpu" "50m" "memory" "32Mi") "limits" (dict "memory" "32Mi"))) | nindent 8 }}
      volumeMounts:
        {{- range $folders }}
        - {name: {{ trimPrefix "/" . }}, mountPath: {{ . }}}
        {{- end }}
    {{- end }}
    {{- with $set.initContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  containers:
    - name: {{ $kind }}
      {{- include (printf "headrace.container.%s" $is.container) $about | nindent 6 }}
      {{- with $set.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext: {{- include "headrace.containerSecurity" $about | nindent 8 }}
      {{- $resources := deepCopy $set.resources }}
      {{- with include "headrace.memoryGi" $about }}
      {{- $resources = mustMergeOverwrite $resources (dict "requests" (dict "memory" .) "limits" (dict "memory" .)) }}
      {{- end }}
      {{- if $set.gpus }}
      {{- $resources = mustMergeOverwrite $resources (dict "limits" (dict $root.Values.gpu.resource (toString $set.gpus))) }}
      {{- end }}
      {{- with $set.rdma }}{{ if .resource }}
      {{- $resources = mustMergeOverwrite $resources (dict "limits" (dict .resource (toString .count))) }}
      {{- end }}{{ end }}
      resources: {{- include "headrace.resources" (dict "root" $root "resources" $resources) | nindent 8 }}
      volumeMounts:
        {{- $mounts | nindent 8 }}
        {{- with $set.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    {{- include "headrace.volumes" $about | nindent 4 }}
    {{- with $set.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{/*
The rights of a container: none. One with users' code of another user, or with RDMA's locked memory, is started as root,
and its entry point (deploy/as_service.sh) makes it user 10001 with these capabilities alone.
*/}}
{{- define "headrace.containerSecurity" -}}
{{- $kept := list -}}
{{- if and .root.Values.usersCode.ownUser (has .kind (list "reward" "simulator")) -}}
{{- $kept = list "CHOWN" "DAC_OVERRIDE" "FOWNER" "KILL" "SETGID" "SETUID" "SYS_PTRACE" -}}
{{- else if (.set.rdma | default dict).resource -}}
{{- $kept = list "IPC_LOCK" "SETGID" "SETUID" -}}
{{- end -}}
{{- if $kept -}}
runAsNonRoot: false
runAsUser: 0
runAsGroup: 0
{{ end -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]{{ with $kept }}, add: [{{ join ", " . }}]{{ end }}}
{{- end -}}

{{/* Folders of the node that a pod writes, by where they are mounted, as YAML. */}}
{{- define "headrace.nodeFolders" -}}
{{- $storage := .root.Values.storage -}}
{{- if and .is.devices $storage.weights.hostPath (ne .kind "simulator") }}
- /weights
{{- end }}
{{- if and .is.devices $storage.cache.hostPath }}
- /cache
{{- end }}
{{- end -}}

{{- define "headrace.mounts" -}}
{{- if .is.secrets }}
- {name: secrets, mountPath: /secrets, readOnly: true}
{{- end }}
{{- if .tls }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- if .access }}
- {name: access, mountPath: /access, readOnly: true}
{{- end }}
{{- if .is.tmp }}
- {name: tmp, mountPath: /tmp}
{{- end }}
{{- if eq .kind "redis" }}
- {name: run, mountPath: /run/redis}
- {name: store, mountPath: /store}
{{- end }}
{{- if .is.devices }}
- {name: shm, mountPath: /dev/shm}
- {name: weights, mountPath: /weights}
- {name: cache, mountPath: /cache}
{{- end }}
{{- $files := .root.Values.storage.files }}
{{- range $claim, $how := .is.claims }}
{{- if or (ne $claim "files") $files.existingClaim }}
- {name: {{ $claim }}, mountPath: {{ ternary $files.mountPath (printf "/%s" $claim) (eq $claim "files") }}{{ if eq $how "ro" }}, readOnly: true{{ end }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "headrace.volumes" -}}
{{- $root := .root -}}
{{- $storage := $root.Values.storage -}}
{{- if .is.secrets }}
- name: secrets
  secret:
    secretName: {{ include "headrace.secret" $root }}
    defaultMode: 0440
    items:
      {{- range .is.secrets }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}
{{- if .tls }}
- name: tls
  secret:
    secretName: {{ include "headrace.certificate" (dict "root" $root "role" .kind) }}
    defaultMode: 0440
    items: [{key: ca.crt, path: ca.pem}, {key: tls.crt, path: host.pem}, {key: tls.key, path: host-key.pem}]
{{- end }}
{{- if .access }}
- name: access
  configMap: {name: {{ include "headrace.name" $root }}-access}
{{- end }}
{{- if .is.tmp }}
- name: tmp
  emptyDir: {sizeLimit: {{ .is.tmp }}}
{{- end }}
{{- if eq .kind "redis" }}
- name: run
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
{{- end }}
{{- if .is.devices }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .set.shm }}}
{{- $folders := include "headrace.nodeFolders" . | fromYamlArray }}
- name: weights
  {{- if has "/weights" $folders }}
  hostPath: {path: {{ $storage.weights.hostPath }}, type: DirectoryOrCreate}
  {{- else }}
  emptyDir: {medium: Memory, sizeLimit: {{ include "headrace.weightsGi" . | default .set.weights }}}
  {{- end }}
- name: cache
  {{- if has "/cache" $folders }}
  hostPath: {path: {{ $storage.cache.hostPath }}, type: DirectoryOrCreate}
  {{- else }}
  emptyDir: {sizeLimit: {{ $storage.cache.size }}}
  {{- end }}
{{- end }}
{{- range $claim, $how := .is.claims }}
{{- if or (ne $claim "files") $storage.files.existingClaim }}
- name: {{ $claim }}
  persistentVolumeClaim: {claimName: {{ include "headrace.claim" (dict "root" $root "volume" $claim) }}{{ if eq $how "ro" }}, readOnly: true{{ end }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Variables of every process of the fleet, before those of a container of its own. */}}
{{- define "headrace.env" -}}
- name: HEADRACE_TOKEN_FILE
  value: /secrets/fleet-token
- name: HEADRACE_LOG_LEVEL
  value: {{ .root.Values.logLevel }}
- name: OMP_WAIT_POLICY
  value: PASSIVE
{{- with .root.Values.otlp.endpoint }}
- name: HEADRACE_OTLP_ENDPOINT
  value: {{ . }}
{{- end }}
{{- if .tls }}
- name: HEADRACE_TLS_DIR
  value: /tls
{{- if .root.Values.tls.http }}
- name: HEADRACE_ENCRYPT_ALL
  value: "1"
{{- end }}
{{- end }}
{{- end -}}

{{/* Files of the coordinator that say whose tokens it takes and what specs of a contained fleet may hold, as YAML. */}}
{{- define "headrace.access" -}}
{{- $code := .Values.usersCode -}}
{{- with .Values.oidc }}
oidc.yaml: {{ toYaml . | quote }}
{{- end }}
{{- if eq $code.trust "contained" }}
allow.yaml: {{ toYaml (dict "allow" $code.allow) | quote }}
{{- end }}
{{- end -}}

{{/* What a service with users' code, and the coordinator, are told of a contained fleet. */}}
{{- define "headrace.trust" -}}
{{- $code := .root.Values.usersCode -}}
{{- if and (eq $code.trust "contained") (has .kind (list "coordinator" "reward" "simulator")) -}}
- name: HEADRACE_TRUST
  value: contained
- name: HEADRACE_CONTAINED_NETWORK
  value: {{ $code.network }}
- name: HEADRACE_CONTAINED_REACH
  value: {{ join "," $code.reach | quote }}
{{- end -}}
{{- end -}}

{{/* Variables of `env` and `extraEnv`, after all others: the last one of a name counts. */}}
{{- define "headrace.ownEnv" -}}
{{- range $name, $value := .set.env }}
- name: {{ $name }}
  value: {{ include "headrace.text" $value | quote }}
{{- end }}
{{- with .set.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Kubelet's own probes show no certificate; the container's does. */}}
{{- define "headrace.probe" -}}
exec: {command: [as_service, python, -m, headrace_servicekit.process.probe]}
timeoutSeconds: 15
{{- end -}}
