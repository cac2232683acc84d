//! The dashboard of one peer.

use crate::dashboard::Unit::{
    Bytes, BytesPerSecond, Celsius, Flops, None, PerSecond, Ratio, Seconds, Watts,
};
use crate::dashboard::{Dashboard, Panel, curves, number};

pub(crate) const fn dashboard() -> Dashboard {
    Dashboard {
        uid: "shoal-node",
        title: "Shoal: a node",
        choices: &[
            ("run", "label_values(shoal_steps_total, run)"),
            ("instance", r#"label_values(shoal_steps_total{run="$run"}, instance)"#),
        ],
        panels: PANELS,
    }
}

const PANELS: &[Panel] = &[
    number("State", None, &[("{{state}}", r#"shoal_node_state{instance="$instance"} == 1"#)]),
    number(
        "Stages",
        None,
        &[("{{pipeline_stage}}", r#"shoal_stage_hosted{instance="$instance"} == 1"#)],
    ),
    number("Version", None, &[("{{version}}", r#"shoal_build_info{instance="$instance"}"#)]),
    number(
        "Coordinator",
        None,
        &[("coordinator", r#"shoal_is_coordinator{instance="$instance"}"#)],
    ),
    number("Step", None, &[("step", r#"shoal_step{instance="$instance"}"#)]),
    number("Connections", None, &[("{{path}}", r#"shoal_connections{instance="$instance"}"#)]),
    number("Own port", None, &[("{{state}}", r#"shoal_own_port{instance="$instance"} == 1"#)]),
    curves(
        "Compute",
        Flops,
        &[
            ("done", r#"rate(shoal_flops_total{instance="$instance"}[$__rate_interval])"#),
            ("peak", r#"shoal_peak_flops_per_second{instance="$instance"}"#),
        ],
    ),
    curves(
        "Engine",
        Ratio,
        &[
            (
                "busy",
                r#"rate(shoal_compute_busy_seconds_total{instance="$instance"}[$__rate_interval])"#,
            ),
            (
                "{{phase}}",
                r#"sum by (phase) (rate(shoal_phase_duration_seconds_sum{instance="$instance"}[$__rate_interval]))"#,
            ),
        ],
    ),
    curves(
        "One task, 95%",
        Seconds,
        &[(
            "{{phase}}",
            r#"histogram_quantile(0.95, sum by (phase, le) (rate(shoal_phase_duration_seconds_bucket{instance="$instance"}[$__rate_interval])))"#,
        )],
    ),
    curves(
        "Microbatches",
        PerSecond,
        &[(
            "{{direction}}",
            r#"rate(shoal_microbatches_computed_total{instance="$instance"}[$__rate_interval])"#,
        )],
    ),
    curves("Queues", None, &[("{{queue}}", r#"shoal_queue_length{instance="$instance"}"#)]),
    curves(
        "Processor",
        Ratio,
        &[("cores", r#"rate(process_cpu_seconds_total{instance="$instance"}[$__rate_interval])"#)],
    ),
    curves(
        "Memory",
        Bytes,
        &[
            ("resident", r#"process_resident_memory_bytes{instance="$instance"}"#),
            ("limit", r#"shoal_memory_limit_bytes{instance="$instance"}"#),
            ("needed by stages", r#"shoal_memory_needed_bytes{instance="$instance"}"#),
            ("machine", r#"shoal_host_memory_bytes{instance="$instance"}"#),
            ("available", r#"shoal_host_memory_available_bytes{instance="$instance"}"#),
        ],
    ),
    curves(
        "Tensors",
        Bytes,
        &[("{{device}}, {{kind}}", r#"shoal_tensor_memory_bytes{instance="$instance"}"#)],
    ),
    curves(
        "Swapped",
        BytesPerSecond,
        &[(
            "{{direction}}",
            r#"rate(shoal_host_swapped_bytes_total{instance="$instance"}[$__rate_interval])"#,
        )],
    ),
    curves(
        "Device memory",
        Bytes,
        &[
            ("{{device}}, used", r#"shoal_device_memory_used_bytes{instance="$instance"}"#),
            ("{{device}}, total", r#"shoal_device_memory_bytes{instance="$instance"}"#),
        ],
    ),
    curves(
        "Device utilization",
        Ratio,
        &[("{{device}}", r#"shoal_device_utilization_ratio{instance="$instance"}"#)],
    ),
    curves(
        "Device power",
        Watts,
        &[("{{device}}", r#"shoal_device_power_watts{instance="$instance"}"#)],
    ),
    curves(
        "Device temperature",
        Celsius,
        &[("{{device}}", r#"shoal_device_temperature_celsius{instance="$instance"}"#)],
    ),
    number(
        "Requests to leave",
        None,
        &[("{{source}}", r#"shoal_preemptions_total{instance="$instance"}"#)],
    ),
    curves(
        "Output log",
        Bytes,
        &[
            ("all", r#"shoal_output_log_bytes{instance="$instance"}"#),
            ("on the disk", r#"shoal_output_log_disk_bytes{instance="$instance"}"#),
            ("limit in memory", r#"shoal_output_log_limit_bytes{instance="$instance"}"#),
        ],
    ),
    curves(
        "Stages swapped",
        BytesPerSecond,
        &[
            (
                "{{direction}}",
                r#"rate(shoal_stage_swap_bytes_total{instance="$instance"}[$__rate_interval])"#,
            ),
            (
                "to the device",
                r#"rate(shoal_stage_copy_bytes_total{instance="$instance"}[$__rate_interval])"#,
            ),
            (
                "of these, late",
                r#"rate(shoal_stage_copy_late_bytes_total{instance="$instance"}[$__rate_interval])"#,
            ),
        ],
    ),
    curves(
        "Engine waits for stages",
        Ratio,
        &[(
            "of the time",
            r#"rate(shoal_stage_swap_wait_seconds_total{instance="$instance"}[$__rate_interval])"#,
        )],
    ),
    curves("In flight", Bytes, &[("bytes", r#"shoal_in_flight_bytes{instance="$instance"}"#)]),
    curves(
        "Sent",
        BytesPerSecond,
        &[("{{kind}}", r#"rate(shoal_sent_bytes_total{instance="$instance"}[$__rate_interval])"#)],
    ),
    curves(
        "Received",
        BytesPerSecond,
        &[(
            "{{kind}}",
            r#"rate(shoal_received_bytes_total{instance="$instance"}[$__rate_interval])"#,
        )],
    ),
    curves(
        "Tensors sent",
        BytesPerSecond,
        &[
            (
                "{{packing}}, before",
                r#"rate(shoal_unpacked_bytes_total{instance="$instance"}[$__rate_interval])"#,
            ),
            (
                "{{packing}}, after",
                r#"rate(shoal_packed_bytes_total{instance="$instance"}[$__rate_interval])"#,
            ),
        ],
    ),
    curves(
        "Tensors and pieces of files sent",
        PerSecond,
        &[
            (
                "tensors, {{packing}}",
                r#"rate(shoal_tensors_sent_total{instance="$instance"}[$__rate_interval])"#,
            ),
            (
                "pieces, {{packing}}",
                r#"rate(shoal_pieces_sent_total{instance="$instance"}[$__rate_interval])"#,
            ),
        ],
    ),
    curves(
        "Round trips, 95%",
        Seconds,
        &[(
            "95%",
            r#"histogram_quantile(0.95, sum by (le) (rate(shoal_link_rtt_seconds_bucket{instance="$instance"}[$__rate_interval])))"#,
        )],
    ),
    curves(
        "Congestion window, median",
        Bytes,
        &[(
            "median",
            r#"histogram_quantile(0.5, sum by (le) (rate(shoal_link_congestion_window_bytes_bucket{instance="$instance"}[$__rate_interval])))"#,
        )],
    ),
    curves(
        "Lost in transit",
        BytesPerSecond,
        &[("lost", r#"rate(shoal_link_lost_bytes_total{instance="$instance"}[$__rate_interval])"#)],
    ),
    curves(
        "Rejected from others",
        PerSecond,
        &[
            ("{{reason}}", r#"rate(shoal_refused_total{instance="$instance"}[$__rate_interval])"#),
            (
                "connection: {{reason}}",
                r#"rate(shoal_connections_refused_total{instance="$instance"}[$__rate_interval])"#,
            ),
        ],
    ),
    curves(
        "Faults",
        None,
        &[
            ("fault: {{fault}}", r#"shoal_faults_total{instance="$instance"}"#),
            ("not spilled", r#"shoal_spill_failures_total{instance="$instance"}"#),
            ("checkpoints failed", r#"shoal_checkpoint_failures_total{instance="$instance"}"#),
            (
                "checkpoints without scores",
                r#"shoal_checkpoint_score_failures_total{instance="$instance"}"#,
            ),
            (
                "checkpoint uploads failed",
                r#"shoal_checkpoint_upload_failures_total{instance="$instance"}"#,
            ),
            ("logged: {{level}}", r#"shoal_log_messages_total{instance="$instance"}"#),
        ],
    ),
    curves(
        "Scores of checkpoints",
        None,
        &[
            ("{{name}}", r#"shoal_checkpoint_score{instance="$instance"}"#),
            ("of version", r#"shoal_checkpoint_scored_step{instance="$instance"}"#),
        ],
    ),
    curves(
        "Writing a stage of a checkpoint",
        Seconds,
        &[(
            "95%",
            r#"histogram_quantile(0.95, sum by (le) (rate(shoal_checkpoint_write_duration_seconds_bucket{instance="$instance"}[1h])))"#,
        )],
    ),
    curves(
        "Disk",
        Bytes,
        &[
            ("size", r#"shoal_disk_bytes{instance="$instance"}"#),
            ("free", r#"shoal_disk_available_bytes{instance="$instance"}"#),
        ],
    ),
    curves("Open files", None, &[("files", r#"process_open_fds{instance="$instance"}"#)]),
];
