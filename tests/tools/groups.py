"""Runs `pmoe groups` on every golden layout and on wrong command lines."""
import argparse
import json
import subprocess
import sys


def expect(condition, what):
    if not condition:
        sys.exit(f"groups: {what}")


def run(pmoe, *arguments):
    return subprocess.run([pmoe, "groups", *arguments], capture_output=True, text=True, check=False)


def options_of(config):
    return [f"--{name}={config[name]}" for name in ("world", "tp", "cp", "pp", "ep", "etp", "order")]


def check_valid(pmoe, name, entry):
    done = run(pmoe, *options_of(entry["config"]), "--json")
    expect(done.returncode == 0 and not done.stderr, f"{name}: exit status {done.returncode}\n{done.stderr}")
    got = json.loads(done.stdout)
    dense = {group: lists for group, lists in entry["dense"].items() if group != "embd"}
    expect(got["dense"] == dense, f"{name}: dense is {got['dense']}; {dense} was expected")
    expect(got["expert"] == entry["expert"], f"{name}: expert is {got['expert']}; {entry['expert']} was expected")
    expect(got["sizes"] == entry["sizes"], f"{name}: sizes are {got['sizes']}; {entry['sizes']} was expected")
    config = {key: entry["config"][key] for key in got["config"]}
    expect(got["config"] == config, f"{name}: config is {got['config']}; {config} was expected")
    text = run(pmoe, *options_of(entry["config"]))
    expect(text.returncode == 0 and "stage 0: experts" in text.stdout, f"{name}: no drawing")
    expect(max(map(len, text.stdout.splitlines())) <= 200, f"{name}: very long lines")


def check_invalid(pmoe, name, entry):
    done = run(pmoe, *options_of(entry["config"]))
    expect(done.returncode == 2 and done.stderr and not done.stdout, f"{name}: exit status {done.returncode}\n{done.stdout}")


TEXT = """\
world 8: tp 2, cp 1, dp 4, pp 1; etp 2, ep 2, edp 2, pp 1; order tp-cp-ep-dp-pp

dense       size groups  ranks
  tp           2      4  0,1  2,3  4,5  6,7
  cp           1      8  0  1  2  3  4  5  6  7
  pp           1      8  0  1  2  3  4  5  6  7
  dp           4      2  0,2,4,6  1,3,5,7
  dp_cp        4      2  0,2,4,6  1,3,5,7
  tp_cp        2      4  0,1  2,3  4,5  6,7
  tp_dp        8      1  0-7
  tp_dp_cp     8      1  0-7
  mp           2      4  0,1  2,3  4,5  6,7

expert      size groups  ranks
  ep           2      4  0,2  1,3  4,6  5,7
  expt_tp      2      4  0,1  2,3  4,5  6,7
  tp_ep        4      2  0-3  4-7
  tp_ep_pp     4      2  0-3  4-7
  expt_dp      2      4  0,4  1,5  2,6  3,7

stage 0: dense layers
              tp 0  tp 1
  dp cp    0     0     1
  dp cp    1     2     3
  dp cp    2     4     5
  dp cp    3     6     7
stage 0: experts, the ranks of one expert's shards joined by +
              ep 0  ep 1
  edp      0   0+1   2+3
  edp      1   4+5   6+7
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pmoe", required=True)
    parser.add_argument("--golden", required=True)
    options = parser.parse_args()
    with open(options.golden, encoding="utf-8") as file:
        golden = json.load(file)
    for name, entry in golden["valid"].items():
        check_valid(options.pmoe, name, entry)
    for name, entry in golden["invalid"].items():
        check_invalid(options.pmoe, name, entry)
    text = run(options.pmoe, "--world", "8", "--tp", "2", "--etp", "2", "--ep", "2").stdout
    expect(text == TEXT, f"text is\n{text}\n{TEXT}\nwas expected")
    for wrong in ([], ["--world", "x"], ["--world", "0"], ["--world", "8", "--tp", "3"], ["--world", "8", "more"], ["--world", "8", "--order", "tp"]):
        done = run(options.pmoe, *wrong)
        expect(done.returncode == 2 and done.stderr and not done.stdout, f"{wrong}: exit status {done.returncode}")
    for line in (["nothing"], []):
        done = subprocess.run([options.pmoe, *line], capture_output=True, text=True, check=False)
        expect(done.returncode == 2 and done.stderr, f"{line}: exit status {done.returncode}")
    print(f"{len(golden['valid'])} layouts, {len(golden['invalid'])} refusals")


main()
