//! The dashboard of a run.

use crate::dashboard::Unit::{Bytes, BytesPerSecond, Flops, None, PerSecond, Ratio, Seconds};
use crate::dashboard::{Dashboard, Panel, curves, number, table};

pub(crate) const fn dashboard() -> Dashboard {
    Dashboard {
        uid: "shoal-run",
        title: "Shoal: a run",
        choices: &[("run", "label_values(shoal_steps_total, run)")],
        panels: PANELS,
    }
}

const PANELS: &[Panel] = &[
    number(
        "Step",
        None,
        &[
            ("step", r#"run:shoal_step:max{run="$run"}"#),
            ("of", r#"run:shoal_planned_steps:max{run="$run"}"#),
        ],
    ),
    number(
        "Training loss",
        None,
        &[("nats per token", r#"run:shoal_training_loss:max{run="$run"}"#)],
    ),
    number("Tokens", PerSecond, &[("tokens", r#"run:shoal_tokens:rate5m{run="$run"}"#)]),
    number(
        "Model FLOPs utilization",
        Ratio,
        &[("of peak", r#"run:shoal_flops:utilization{run="$run"}"#)],
    ),
    number(
        "Since the last commit",
        Seconds,
        &[("time", r#"run:shoal_last_commit:age_seconds{run="$run"}"#)],
    ),
    number(
        "Time left",
        Seconds,
        &[(
            "time",
            r#"(run:shoal_planned_steps:max{run="$run"} - run:shoal_step:max{run="$run"}) / run:shoal_steps:rate5m{run="$run"}"#,
        )],
    ),
    table(
        "Peers",
        &[
            (
                "",
                r#"max by (instance, name, peer, hardware, island) (shoal_peer_info{run="$run"})"#,
            ),
            ("", r#"max by (instance, state) (shoal_node_state{run="$run"} == 1)"#),
            ("stages", r#"sum by (instance) (shoal_stage_hosted{run="$run"})"#),
            (
                "busy, of the time",
                r#"max by (instance) (rate(shoal_compute_busy_seconds_total{run="$run"}[5m]))"#,
            ),
            (
                "memory free, GiB",
                r#"max by (instance) (shoal_host_memory_available_bytes{run="$run"}) / 2^30"#,
            ),
            (
                "disk free, GiB",
                r#"max by (instance) (shoal_disk_available_bytes{run="$run"}) / 2^30"#,
            ),
            (
                "sent, MiB/s",
                r#"sum by (instance) (rate(shoal_sent_bytes_total{run="$run"}[5m])) / 2^20"#,
            ),
            (
                "received, MiB/s",
                r#"sum by (instance) (rate(shoal_received_bytes_total{run="$run"}[5m])) / 2^20"#,
            ),
        ],
    ),
    curves(
        "Loss",
        None,
        &[
            ("training", r#"run:shoal_training_loss:max{run="$run"}"#),
            ("held out", r#"max(shoal_held_out_loss{run="$run"})"#),
        ],
    ),
    curves(
        "Gradient norm",
        None,
        &[("before clipping", r#"max(shoal_gradient_norm{run="$run"})"#)],
    ),
    curves(
        "Outlier steps",
        None,
        &[(
            "{{reason}}",
            r#"max by (reason) (increase(shoal_outlier_steps_total{run="$run"}[$__rate_interval]))"#,
        )],
    ),
    curves("Learning rate", None, &[("learning rate", r#"max(shoal_learning_rate{run="$run"})"#)]),
    curves(
        "Load of the busiest expert, of the mean",
        None,
        &[("{{pipeline_stage}}", r#"max by (pipeline_stage) (shoal_expert_load{run="$run"})"#)],
    ),
    curves(
        "Entropy of the routers, in nats",
        None,
        &[("{{pipeline_stage}}", r#"avg by (pipeline_stage) (shoal_router_entropy{run="$run"})"#)],
    ),
    curves("Speed", PerSecond, &[("tokens", r#"run:shoal_tokens:rate5m{run="$run"}"#)]),
    curves(
        "Time of a step",
        Seconds,
        &[
            (
                "median",
                r#"max(histogram_quantile(0.5, sum by (instance, le) (rate(shoal_step_duration_seconds_bucket{run="$run"}[$__rate_interval]))))"#,
            ),
            (
                "95%",
                r#"max(histogram_quantile(0.95, sum by (instance, le) (rate(shoal_step_duration_seconds_bucket{run="$run"}[$__rate_interval]))))"#,
            ),
            (
                "all-reduce, median",
                r#"histogram_quantile(0.5, sum by (le) (rate(shoal_all_reduce_duration_seconds_bucket{run="$run"}[$__rate_interval])))"#,
            ),
        ],
    ),
    curves(
        "Utilization of the devices",
        Ratio,
        &[
            ("model FLOPs utilization", r#"run:shoal_flops:utilization{run="$run"}"#),
            ("engines busy", r#"run:shoal_compute_busy:ratio{run="$run"}"#),
        ],
    ),
    curves(
        "Replicas of each stage",
        None,
        &[
            ("{{pipeline_stage}}, serving", r#"stage:shoal_peers:serving{run="$run"}"#),
            ("{{pipeline_stage}}, joining", r#"stage:shoal_peers:joining{run="$run"}"#),
        ],
    ),
    curves(
        "Members",
        None,
        &[
            ("members", r#"max(shoal_members{run="$run"})"#),
            ("{{state}}", r#"sum by (state) (shoal_node_state{run="$run"})"#),
        ],
    ),
    curves(
        "Coordination",
        None,
        &[
            ("anchors", r#"max(shoal_anchors{run="$run"})"#),
            ("era", r#"max(shoal_era{run="$run"})"#),
            ("terms", r#"sum(shoal_terms_total{run="$run"})"#),
            ("paused", r#"max(shoal_log_paused{run="$run"})"#),
        ],
    ),
    curves(
        "Members lost, candidates refused",
        PerSecond,
        &[
            ("lost", r#"sum(rate(shoal_members_lost_total{run="$run"}[$__rate_interval]))"#),
            (
                "refused",
                r#"sum(rate(shoal_candidates_refused_total{run="$run"}[$__rate_interval]))"#,
            ),
        ],
    ),
    curves(
        "Repeated work, of all tokens",
        Ratio,
        &[("{{reason}}", r#"run:shoal_tokens_repeated:ratio{run="$run"}"#)],
    ),
    curves(
        "Claims",
        PerSecond,
        &[
            (
                "replayed",
                r#"sum(rate(shoal_microbatches_replayed_total{run="$run"}[$__rate_interval]))"#,
            ),
            (
                "requested back",
                r#"sum(rate(shoal_claims_reclaimed_total{run="$run"}[$__rate_interval]))"#,
            ),
            (
                "reported twice",
                r#"max(rate(shoal_microbatches_duplicated_total{run="$run"}[$__rate_interval]))"#,
            ),
        ],
    ),
    curves(
        "Recovery and joins",
        Seconds,
        &[
            (
                "from a loss to the next commit, 95%",
                r#"histogram_quantile(0.95, sum by (le) (rate(shoal_recovery_duration_seconds_bucket{run="$run"}[1h])))"#,
            ),
            (
                "until a newcomer serves, 95%",
                r#"histogram_quantile(0.95, sum by (le) (rate(shoal_join_duration_seconds_bucket{run="$run"}[1h])))"#,
            ),
        ],
    ),
    curves(
        "All-reduces",
        PerSecond,
        &[
            ("committed", r#"sum(rate(shoal_rounds_total{run="$run"}[$__rate_interval]))"#),
            ("mended", r#"sum(rate(shoal_rounds_mended_total{run="$run"}[$__rate_interval]))"#),
            (
                "failed: {{reason}}",
                r#"sum by (reason) (rate(shoal_rounds_failed_total{run="$run"}[$__rate_interval]))"#,
            ),
        ],
    ),
    curves(
        "Returns to a checkpoint",
        None,
        &[("rewinds", r#"sum(shoal_rewinds_total{run="$run"})"#)],
    ),
    curves(
        "Audits",
        None,
        &[("{{result}}", r#"sum by (result) (shoal_audits_total{run="$run"})"#)],
    ),
    curves(
        "Changes of a member's stage",
        None,
        &[
            ("begun: {{reason}}", r#"sum by (reason) (shoal_moves_begun_total{run="$run"})"#),
            ("done: {{reason}}", r#"sum by (reason) (shoal_moves_done_total{run="$run"})"#),
            (
                "cancelled: {{reason}}",
                r#"sum by (reason) (shoal_moves_given_up_total{run="$run"})"#,
            ),
        ],
    ),
    curves(
        "Bytes sent",
        BytesPerSecond,
        &[("{{kind}}", r#"run:shoal_sent_bytes:rate5m{run="$run"}"#)],
    ),
    curves(
        "Bytes sent per token",
        Bytes,
        &[("bytes", r#"run:shoal_sent_bytes:per_token{run="$run"}"#)],
    ),
    curves("Packing", None, &[("times smaller", r#"run:shoal_packing:ratio{run="$run"}"#)]),
    curves(
        "Round trips",
        Seconds,
        &[
            (
                "median",
                r#"histogram_quantile(0.5, sum by (le) (rate(shoal_link_rtt_seconds_bucket{run="$run"}[$__rate_interval])))"#,
            ),
            (
                "95%",
                r#"histogram_quantile(0.95, sum by (le) (rate(shoal_link_rtt_seconds_bucket{run="$run"}[$__rate_interval])))"#,
            ),
        ],
    ),
    curves(
        "Link throughput",
        BytesPerSecond,
        &[
            (
                "median",
                r#"histogram_quantile(0.5, sum by (le) (rate(shoal_link_rate_bytes_per_second_bucket{run="$run"}[$__rate_interval])))"#,
            ),
            (
                "slowest 5%",
                r#"histogram_quantile(0.05, sum by (le) (rate(shoal_link_rate_bytes_per_second_bucket{run="$run"}[$__rate_interval])))"#,
            ),
        ],
    ),
    curves(
        "Packets lost",
        Ratio,
        &[(
            "lost",
            r#"sum(rate(shoal_link_lost_packets_total{run="$run"}[$__rate_interval])) / sum(rate(shoal_link_packets_total{run="$run"}[$__rate_interval]))"#,
        )],
    ),
    curves(
        "Steps since the newest checkpoint",
        None,
        &[
            (
                "steps",
                r#"run:shoal_step:max{run="$run"} - on (run) max by (run) (shoal_checkpoint_step{run="$run"})"#,
            ),
            ("planned", r#"max(shoal_checkpoint_interval_steps{run="$run"})"#),
        ],
    ),
    curves(
        "Work at risk",
        Seconds,
        &[("lost if all peers die", r#"max(shoal_work_at_risk_seconds{run="$run"})"#)],
    ),
    curves(
        "Redundancy",
        None,
        &[
            ("stages with one replica", r#"max(shoal_single_replica_stages{run="$run"})"#),
            ("spare anchors", r#"max(shoal_spare_anchors{run="$run"})"#),
        ],
    ),
    curves(
        "Age of the newest checkpoint",
        Seconds,
        &[("age", r#"time() - max(shoal_last_checkpoint_timestamp_seconds{run="$run"})"#)],
    ),
    curves(
        "Compute",
        Flops,
        &[
            ("done", r#"sum(rate(shoal_flops_total{run="$run"}[$__rate_interval]))"#),
            ("peak", r#"sum(shoal_peak_flops_per_second{run="$run"})"#),
        ],
    ),
];
