"""What a tenant can try, and what was proven of each placement: each by tests that are there.

docs/security.md and docs/placements.md say what; here is which tests show it, by the words and names of their tables.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resolver.hami.placements import PLACEMENTS
from tests.unit.test_docs import section_of

ATTEMPTS = {
    "name another container's process in its slot": (
        "test_a_process_that_does_not_map_the_file_is_not_the_owner",
        "test_a_thousand_claims_and_a_flood_of_new_ones_cost_a_bounded_share",
    ),
    "look like another container, by mounts of its own": (
        "test_a_forged_mount_is_no_container",
        "test_mounts_that_are_made_after_the_process_was_seen",
    ),
    (
        "where every container can reach every file (KAI): take a slot in "
        "a victim's file, with a number of its own or with the victim's"
    ): (
        "test_a_guest_in_a_victims_file_is_not_written_into_it",
        "test_with_a_guest_from_the_start_nothing_is_certain",
        "test_a_guest_with_the_victims_number_leaves_the_slot_to_nobody",
        "test_a_guest_who_comes_later_is_only_a_guest",
    ),
    "there: exchange directories, before the daemon starts or while it runs": (
        "test_exchanged_directories_exchange_nobody",
        "test_a_living_victims_load_is_not_zeroed_below_another_name",
        "test_a_file_that_was_moved_while_it_was_opened",
    ),
    "there: make directories and files in the names of others, or very many": (
        "test_a_file_that_the_attacker_made_in_the_victims_name",
        "test_directories_with_forged_names_are_told_and_hide_nobody",
        "test_a_flood_of_entries_hides_none",
    ),
    "there: hard links to a victim's file, or a link that leads a victim to one's own file": (
        "test_a_second_name_for_the_victims_file_is_refused",
        "test_a_victim_that_is_led_to_the_attackers_file_is_not_written_into_it",
    ),
    "there: have one's own file's container take for another of the same pod": (
        "test_two_containers_of_a_pod_in_one_file_are_not_guessed",
        "test_a_process_beside_in_the_same_pod_is_not_the_owner",
    ),
    "there: make the directory look like HAMi's, by its mode, and bind-mount a victim's as HAMi does": (
        "test_a_mount_proves_nothing_below_a_tree_that_a_preloaded_container_has",
        "test_once_shared_it_stays_so",
    ),
    "there: a control group with another pod's name, below one's own": (
        "test_the_only_container_in_a_cgroup",
    ),
    "with a shared ResourceClaim: have the other container's slot taken for one's own": (
        "test_one_pid_in_two_containers_of_a_claim_is_not_guessed",
    ),
    "put a symbolic link, FIFO, device or second name in the place of its file": (
        "test_a_hostile_file_is_counted_and_keeps_nobody_waiting",
        "test_a_fifo_with_a_writer_and_a_device_are_never_even_opened",
        "test_mounts_below_a_containers_directory_are_refused",
    ),
    "with `--mapped-regions`: have another file opened than the one it maps": (
        "test_files_of_two_snapshots_are_never_taken_for_one_another",
        "test_what_is_not_the_mapped_file_is_left_alone",
        "test_a_file_that_the_process_may_only_read_is_never_written",
        "test_a_file_that_two_containers_share_is_never_guessed",
    ),
    "with `--mapped-regions`: lead the walk to a file system that never answers, such as an overlay over FUSE": (
        "test_a_file_system_that_never_answers_keeps_only_itself_waiting",
        "test_the_root_is_open_before_the_user_namespace_is_looked_at",
    ),
    "swap the directory itself": ("test_a_container_directory_swapped_for_a_link_lets_go_of_its_regions",),
    "truncate the file while it is written": (
        "test_a_file_that_is_cut_under_the_writer_kills_the_writer_only",
        "test_a_tenant_that_cuts_its_file_is_left_alone_for_a_while",
    ),
    "make the writer hang": ("test_a_writer_that_hangs_is_killed_and_the_next_one_tries_again",),
    "put a new file in the place of one that killed the writer": (
        "test_a_new_file_in_its_place_is_not_forgiven",
    ),
    "make the daemon work for it: thousands of slots, mappings, mounts, values that change all the time": (
        "test_a_good_containers_repair_does_not_wait_for_an_expensive_one",
        "test_who_costs_too_much_waits_alone_and_it_is_said",
        "test_where_turns_take_long_some_wait_for_the_next_pass_and_nobody_for_ever",
    ),
    "fill the log": (
        "test_a_thousand_slots_at_once_cost_a_few_lines",
        "test_files_that_come_and_go_cost_few_lines_for_each_container",
        "test_what_another_writer_costs_in_lines_is_one_for_each_time_it_is_met",
    ),
    "move slots while they are written": (
        "test_no_write_lands_on_another_owner",
        "test_tenants_that_compact_while_the_daemon_repairs",
    ),
    "end and be replaced under the same PID, between check and write": (
        "test_the_daemon_itself_races_with_slots_of_real_processes",
        "test_a_number_that_is_used_again_between_map_and_look",
    ),
    "have a namespace's number used again": ("test_two_hundred_namespaces_in_a_row",),
    "change `hostpid` back, again and again": ("test_another_writer_is_not_fought",),
    "write counts, sizes and names into the header that can't be": (
        "test_any_size_and_start_is_a_layout_or_refused",
        "test_a_header_that_goes_wrong_is_refused_every_time",
    ),
    "make thousands of files, directories or slots": (
        "test_ten_thousand_files_delay_nobody",
        "test_ten_thousand_containers_are_found_little_by_little",
    ),
    "make its map or mount table endless": (
        "test_no_more_is_read_than_a_tenant_may_fill",
        "test_of_a_containers_mount_table_less_is_read",
        "test_a_neighbour_that_makes_itself_unreadable_hides_nobody_else",
    ),
    "nest control groups, or hold a file open, so deep that the path is longer than the kernel shows": (
        "test_control_groups_deeper_than_a_path_can_be_hide_nobody_else",
        "test_an_open_file_without_a_path_hides_nobody_else",
    ),
    "have a living process called dead, by `chroot`, `pivot_root` or mounts of its own": (
        "test_a_process_that_left_the_mounts_is_alive_and_the_owner",
        "test_it_is_alive_too_where_nothing_tells_whose_it_is",
        "test_a_number_is_vacant_only_where_an_owner_was_seen_and_nobody_has_it",
    ),
    (
        "make the search for owners expensive: a thousand claims, "
        "a `hostpid` that flips, namespaces, mappings without end"
    ): (
        "test_a_walk_goes_on_where_it_was_and_says_nothing_before_its_end",
        "test_thousands_of_namespaces_cost_a_thousand_claims_nothing",
        "test_two_tasks_that_bring_it_up_to_date_at_once_agree",
        "test_without_time_it_says_that_some_may_be_missing",
        "test_what_failed_is_remembered_and_looked_at_ever_more_rarely",
        "test_a_change_of_words_brings_no_look_forward_and_a_process_that_attaches_one",
    ),
    "write its file, make and remove files in its directory without end": (
        "test_a_flood_costs_its_own_container_and_nobody_else",
        "test_the_loop_gives_way",
    ),
    "let one number fit several processes, by nesting namespaces": (
        "test_a_pid_that_two_processes_of_a_container_have_is_not_guessed",
    ),
    "have something go wrong in the daemon, again and again": (
        "test_what_goes_wrong_with_one_container_ends_nobody_elses_turn",
    ),
    "fork without end": (
        "test_forks_in_a_namespace_that_uses_its_numbers_again",
        "test_one_that_ends_while_it_is_asked_whether_its_number_is_vacant",
        "test_a_flood_is_counted_to_the_last_event_and_recovered_from",
    ),
    "fill the map": (
        "test_a_map_that_is_too_small_is_counted_and_nothing_in_it_is_wrong",
        "test_what_found_no_room_is_found_by_the_scan",
    ),
    "trace, read or inherit from the driver probe in its PID namespace": (
        "test_no_process_of_the_container_can_reach_into_the_probe",
        "test_a_container_that_could_reach_in_is_not_entered",
    ),
    "kill or stop the driver probe": (
        "test_a_tenant_that_kills_the_probe_only_puts_it_off",
        "test_a_tenant_that_stops_the_probe_costs_its_time_limit",
    ),
    "ask the API about others, on the socket that it was given": (
        "test_a_container_sees_its_own_and_nothing_else",
        "test_a_connection_that_is_handed_over_is_still_its_makers",
    ),
    "shut others out of the API or the broker, by connections or silence": (
        "test_a_container_that_takes_every_connection_it_can_shuts_nobody_out",
        "test_connections_from_nested_namespaces_count_for_their_container",
        "test_silent_ones_cost_nobody_else_anything",
    ),
    "connect and close without end, on the tenants' socket or the metrics' port": (
        "test_containers_that_connect_and_close_without_end_delay_neither_root_nor_the_others",
        "test_a_flood_of_clients_that_come_and_go_breaks_no_scrape",
    ),
    "ask from the host, as a user without rights, for what only root may see": (
        "test_nobody_on_the_host_asks_anything_on_the_tenants_socket",
    ),
    "have the broker tell it another process's number": (
        "test_the_answer_is_never_about_the_next_process_with_that_number",
    ),
    "hide load, or lay it on others, by what its slots say": (
        "test_a_slot_that_lies_neither_hides_load_nor_adds_any",
    ),
    "bring names of its own into labels, the log or a terminal": (
        "test_what_a_tenant_writes_is_no_label",
        "test_a_tenant_cannot_write_lines_of_its_own",
        "test_hostile_names_are_shown_and_not_obeyed",
    ),
    "all of it at once": ("test_everything_at_once",),
}

PROVEN = {
    "hami": (
        "test_every_placement_is_found_and_repaired_beside_the_others",
        "test_every_placement_in_real_containers",
        "test_a_directory_that_is_made_anew_below_a_running_container",
    ),
    "koordinator": (
        "test_every_placement_is_found_and_repaired_beside_the_others",
        "test_every_placement_in_real_containers",
        "test_a_directory_that_is_made_anew_below_a_running_container",
    ),
    "volcano": (
        "test_every_placement_is_found_and_repaired_beside_the_others",
        "test_every_placement_in_real_containers",
        "test_a_directory_that_is_made_anew_below_a_running_container",
        "test_volcanos_monitor_reads_another_directory",
    ),
    "kai": (
        "test_every_placement_is_found_and_repaired_beside_the_others",
        "test_every_placement_in_real_containers",
        "test_two_tenants_with_the_same_number_are_told_apart",
        "test_a_monitor_that_maps_every_file_is_nobody",
        "test_kai_falls_back_to_a_file_of_the_containers_own",
    ),
    "dra": (
        "test_every_placement_is_found_and_repaired_beside_the_others",
        "test_every_placement_in_real_containers",
        "test_a_claim_that_two_pods_share",
        "test_one_pid_in_two_containers_of_a_claim_is_not_guessed",
        "test_one_pid_in_two_containers_of_which_one_maps_the_claims_file",
    ),
    "bare": ("test_a_region_inside_a_container_is_found_and_repaired",),
}


@pytest.fixture(scope="module")
def written(root: Path) -> set[str]:
    """The name of every test there is."""
    tests = root.glob("tests/*/**/test_*.py")
    return {name for path in tests for name in re.findall(r"def (test_\w+)\(", path.read_text())}


def test_every_attempt_has_what_shows_that_it_is_stopped(root: Path) -> None:
    section = section_of(root / "docs/security.md", "What a tenant can try")
    told = re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE)
    assert told == ["attempt", *ATTEMPTS]


def test_every_placement_has_what_was_proven_of_it(root: Path) -> None:
    section = section_of(root / "docs/placements.md", "Schedulers")
    told = re.findall(r"^\| `(\w+)` \| .+ \|$", section, re.MULTILINE)
    assert told == [*PROVEN]
    assert PROVEN.keys() == {row.name for row in PLACEMENTS}


@pytest.mark.parametrize("of", [*ATTEMPTS, *PROVEN])
def test_what_shows_it_is_there(of: str, written: set[str]) -> None:
    assert set((ATTEMPTS | PROVEN)[of]) <= written
