CREATE OR REPLACE PROCEDURE tpcc_new_order(
    w INTEGER, d INTEGER, c INTEGER, items TEXT, suppliers TEXT, quantities TEXT)
RETURNS TABLE (
    order_number INTEGER, last_name TEXT, credit TEXT, discount INTEGER,
    warehouse_tax INTEGER, district_tax INTEGER, total_cents BIGINT)
LANGUAGE lua AS $$
    local item, supplier, quantity =
        string.split(items, ","), string.split(suppliers, ","), string.split(quantities, ",")
    local all_local = 1
    for i = 1, #item do
        item[i], supplier[i], quantity[i] = tonumber(item[i]), tonumber(supplier[i]), tonumber(quantity[i])
        if supplier[i] ~= w then all_local = 0 end
    end

    local district = db.query("SELECT rowid AS place, d_next_o_id, d_tax FROM district \
        WHERE d_w_id = $1 AND d_id = $2", w, d)[1]
    local number = district.d_next_o_id
    db.exec("UPDATE district SET d_next_o_id = $2 WHERE rowid = $1", district.place, number + 1)
    local customer = db.query("SELECT c_discount, c_last, c_credit, w_tax FROM warehouse, customer \
        WHERE w_id = $1 AND c_w_id = $1 AND c_d_id = $2 AND c_id = $3", w, d, c)[1]
    db.exec("INSERT INTO orders (o_w_id, o_d_id, o_id, o_c_id, o_entry_d, o_ol_cnt, o_all_local) \
        VALUES ($1, $2, $3, $4, CURRENT_TIMESTAMP, $5, $6)", w, d, number, c, #item, all_local)
    db.exec("INSERT INTO new_order (no_w_id, no_d_id, no_o_id) VALUES ($1, $2, $3)", w, d, number)

    local read_line = string.format("SELECT i_price, i_name, i_data, \
        stock.rowid AS place, s_quantity, s_data, s_dist_%02d AS dist_info \
        FROM item CROSS JOIN stock WHERE i_id = $1 AND s_w_id = $2 AND s_i_id = $1", d)
    local sum_cents = 0
    for i = 1, #item do
        local line = db.query(read_line, item[i], supplier[i])[1]
        if line == nil then db.abort("Item number is not valid") end
        local left = line.s_quantity - quantity[i]
        db.exec("UPDATE stock SET s_quantity = $2, s_ytd = s_ytd + $3, s_order_cnt = s_order_cnt + 1, \
            s_remote_cnt = s_remote_cnt + $4 WHERE rowid = $1",
            line.place, if left >= 10 then left else left + 91, quantity[i], if supplier[i] == w then 0 else 1)
        local amount_cents = quantity[i] * line.i_price
        db.exec("INSERT INTO order_line (ol_w_id, ol_d_id, ol_o_id, ol_number, ol_i_id, ol_supply_w_id, \
            ol_quantity, ol_amount, ol_dist_info) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            w, d, number, i, item[i], supplier[i], quantity[i], amount_cents, line.dist_info)
        sum_cents += amount_cents
    end
    return {
        order_number = number, last_name = customer.c_last, credit = customer.c_credit,
        discount = customer.c_discount, warehouse_tax = customer.w_tax, district_tax = district.d_tax,
        total_cents = sum_cents * (10000 - customer.c_discount) * (10000 + customer.w_tax + district.d_tax)
            // 100000000,
    }
$$
