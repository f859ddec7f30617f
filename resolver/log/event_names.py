"""Every kind of event that the API serves, and every other event in the log, with its meaning.

An event is also a line of the log, under the same name and with the same fields
(`resolver.log.journal.Journal.record`).
"""

from __future__ import annotations

#: Every kind of event that the API serves, with its meaning.
KINDS = {
    "repair": "a slot's hostpid was written; again after a second `conflict` is not said",
    "events_left_out": "one container caused too many events to record each: how many of each kind were dropped",
    "conflict": "another writer changed a slot's hostpid back, for the `times`-th time",
    "region_found": "a cache file was discovered and is repaired from now on",
    "region_gone": "a cache file is gone",
    "region_abandoned": "no process has a cache file open any more: the utilization in its slots is set to 0",
    "region_quarantined": "the slot writer died or hung on a cache file, which is skipped for a while",
    "container_started": "a container was seen for the first time",
    "container_ended": "a container's last process ended",
    "source": "PIDs come from another source now",
    "source_failed": "the source in use failed",
    "policy": "which number hostpid must be was determined anew",
    "slot_stuck": "a slot's sm_util does not stay what NVML says, though its hostpid is right",
    "gpu_found": "a GPU appeared",
    "gpu_gone": "a GPU is gone",
    "gpu_unhealthy": "a GPU became unhealthy",
    "gpu_healthy": "a GPU is healthy again",
    "gpu_xid": "the driver reported an error of a GPU (XID), for the first time",
    "nvml_unavailable": "NVML does not answer",
    "nvml_available": "NVML answers again",
}

#: The other log events: those that only the log has.
LOGGED = {
    "api_off": "the API's socket can't be opened; the daemon runs without it",
    "broker_answer": "the broker answered a process",
    "broker_off": "the broker's socket can't be opened; it is retried",
    "broker_on": "the broker answers on its socket",
    "capabilities_kept": "capabilities that are no longer needed could not be dropped",
    "containers_dir_found": "a containers directory that was missing exists",
    "containers_dir_missing": "a containers directory does not exist",
    "cordon": "the operator's annotation takes GPUs out of service, or gives them back",
    "daemon_answers": "the reporter reaches the daemon again",
    "daemon_unreachable": "the reporter can't reach the daemon",
    "dead_slots_zeroed": "the utilization in slots of ended processes was set to 0",
    "device_written": "the node's Device object was written",
    "driver_contradicts_version": "a measurement of the driver contradicts what its version promises",
    "driver_not_measured": "the driver can't be measured, so its version decides",
    "ended": "the reporter ended",
    "internal_error": "a defect: the step that failed, with a traceback. The daemon goes on",
    "measurement_not_kept": "a measurement of the driver could not be saved",
    "metrics_off": "the metrics' address can't be opened; the daemon runs without it",
    "metrics_on": "the metrics are served",
    "node_event_failed": "an event could not be recorded on the Node",
    "node_watch_failed": "the Node object can't be watched",
    "node_watch_works": "the Node object is watched again",
    "not_watched": "cache files can't be watched (inotify), so they are checked by the clock alone",
    "out_of_descriptors": "the process has no file descriptors left; further regions wait",
    "region_rejected": "a cache file is not used, with the reason",
    "report_failed": "the Device object can't be written; it is retried",
    "report_works": "the Device object is written again",
    "settings_refused": "the settings could not be reloaded; the old ones stay",
    "settings_reloaded": "the settings were reloaded",
    "source_complete": "the source knows every process again",
    "source_detail": "what the compiler or the kernel's verifier printed",
    "source_incomplete": "the source does not know every process; a scan finds the rest",
    "source_not_closed": "a source that is not used any more could not be closed; what it held may stay until the end",
    "source_unavailable": "a source was tried and does not work here",
    "started": "the daemon, or the reporter, started",
    "stopped": "the daemon stopped, with its counters",
    "took_over": "the daemon that held the node ended; this one writes from now on",
    "waiting": "another daemon holds the node; this one waits for its end",
    "watched_again": "cache files can be watched again",
    "would_repair": "a slot's hostpid would have been written, but for --dry-run",
    "would_write_utilization": "a slot's sm_util would have been written, but for --dry-run",
    "write_failed": "a cache file can't be written",
    "write_works_again": "a cache file can be written again",
    "writer_failed": "the slot writer died or hung; it is retried with a new one",
}
